"""Operators that work on each element alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import integers, mask, positive, real

# Two operands that broadcast in every way: equal shapes, a missing dim, a dim of size one on either side, a scalar.
_PAIRS = (((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 1), (1, 3)), ((5, 4), ()))

_UNARY = (F.relu, F.gelu, torch.sigmoid, torch.tanh, torch.exp, torch.abs, torch.neg)
_UNARY_POSITIVE = (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal)
_BINARY = (torch.add, torch.sub, torch.mul)
_COMPARE = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)

SAMPLES = [
    *(lambda f=f: f(real(4, 3)) for f in _UNARY),
    *(lambda f=f: f(positive(4, 3)) for f in _UNARY_POSITIVE),
    *(lambda f=f, a=a, b=b: f(real(*a), real(*b)) for f in _BINARY for a, b in _PAIRS),
    *(lambda f=f: f(real(4, 3), 2.5) for f in _BINARY),
    *(lambda a=a, b=b: real(*a) / positive(*b) for a, b in _PAIRS),
    lambda: real(4, 3) / 2.0,
    *(lambda f=f: f(integers(3, 4, 3), integers(3, 4, 3)) for f in _COMPARE),
    *(lambda f=f: f(real(4, 3), 0.5) for f in _COMPARE),
    lambda: positive(4, 3) ** 3,
    lambda: positive(4, 3) ** positive(3),
    lambda: real(4, 3).clamp(-0.5, 0.5),
    lambda: torch.where(mask(4, 3), real(4, 1), real(3)),
    lambda: real(4, 3).clone().detach(),
    lambda: real(4, 3, grad=False).add_(real(3, grad=False)),
    lambda: real(4, 3, grad=False).mul_(2.0),
    lambda: real(4, 3, grad=False).relu_(),
    lambda: torch.ops.aten.alias(real(4, 3)),
    lambda: torch.ops.aten.lift_fresh(real(4, 3, grad=False)),
]
