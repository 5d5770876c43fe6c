"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import real

SAMPLES = [
    lambda: real(4, 6) @ real(6, 3),
    lambda: F.linear(real(4, 3, 6), real(5, 6), real(5)),
    lambda: F.linear(real(4, 6), real(5, 6), real(5)),
    lambda: torch.addmm(real(4, 3), real(4, 6), real(6, 3), beta=0.5, alpha=2.0),
    lambda: torch.addmm(real(3), real(4, 6), real(6, 3)),
    lambda: torch.addmm(real(1, 3), real(4, 1), real(1, 3)),
    lambda: torch.bmm(real(2, 4, 5), real(2, 5, 3)),
    lambda: real(1, 6) @ real(6, 1),
]
