"""New tensors in the image of another. Values of "empty" ones are filled, or they could not be compared."""

from __future__ import annotations

import torch

from onecard.rules.samples.data import real

SAMPLES = [
    lambda: torch.zeros_like(real(4, 3)),
    lambda: torch.ones_like(real(4, 3), dtype=torch.int32),
    lambda: torch.full_like(real(4, 3), 2.5),
    lambda: torch.empty_like(real(4, 3)).fill_(1.0),
    lambda: real(4, 3).new_zeros(4, 3),
    lambda: real(4, 3).new_zeros(4, 5),
    lambda: real(4, 3).new_zeros(7),
    lambda: real(4, 3).new_ones(4, 1),
    lambda: real(4, 3).new_full((4, 3), 2.0),
    lambda: real(4, 3).new_empty((4, 3)).fill_(1.0),
    lambda: real(4, 3).new_empty_strided((4, 3), (1, 4)).fill_(1.0),
    lambda: real(4, 3).new_empty_strided((2,), (1,)).fill_(1.0),
]
