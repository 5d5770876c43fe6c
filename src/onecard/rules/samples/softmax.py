"""Softmax and log-softmax, forward and backward."""

from __future__ import annotations

import torch

from onecard.rules.samples.data import real

aten = torch.ops.aten


def _masked() -> torch.Tensor:
    x = real(4, 6, grad=False)
    x[1] = float("-inf")
    x[2, :3] = float("-inf")
    return x


SAMPLES = [
    *(lambda f=f, d=d: f(real(4, 3, 5), d) for f in (torch.softmax, torch.log_softmax) for d in (-1, 0, 1)),
    *(lambda f=f: f(real(1, 6), 0) for f in (torch.softmax, torch.log_softmax)),
    *(lambda f=f: f(real(), 0) for f in (torch.softmax, torch.log_softmax)),
    *(lambda f=f: f(real(5, 6), 1, dtype=torch.float32) for f in (torch.softmax, torch.log_softmax)),
    lambda: aten._safe_softmax(_masked(), -1),
    lambda: aten._safe_softmax(real(3, 4), 0),
]
