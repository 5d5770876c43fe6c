"""Products in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.rules.samples.data import real


def grouped(rows: int, *ends: int, width: int = 8, out: int = 12, turned: bool = True) -> Tensor:
    """``ends``: where each expert's rows end. The kernel wants float32 and widths that are multiples of four."""
    x = real(rows, width).float()
    weights = real(len(ends), out, width).float().mT if turned else real(len(ends), width, out).float()
    return torch.nn.functional.grouped_mm(x, weights, offs=torch.tensor(ends, dtype=torch.int32))


SAMPLES = [
    lambda: grouped(6, 2, 3, 6),
    lambda: grouped(5, 0, 4, 4, 5),
    lambda: grouped(4, 1, 4, turned=False),
]
