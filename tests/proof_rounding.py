"""Pairs of programs that differ in float32: by rounding alone, or by a small fault. For ``test_prove_faults.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

SIZES, SCALES = (3000, 20000), (1.0, 1e4)


def _place() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def _total(x: torch.Tensor) -> torch.Tensor:
    n, rank = _place()
    total = x.tensor_split(n)[rank].sum()
    if n > 1:
        dist.all_reduce(total)
    return total


def cancelling(size: int, scale: float, seed: int, fault: float) -> Any:
    """A long sum in which little is left of large numbers."""
    torch.manual_seed(seed)
    x = torch.randn(size) * scale
    x = torch.cat([x, -x.flip(0) * (1 - 1e-6)])
    return _total(x) * (1 + fault)


def steep(size: int, scale: float, seed: int, fault: float) -> Any:
    """Steps of descent that are so large that it never settles: each makes what was rounded about twice as large."""
    torch.manual_seed(seed)
    x = torch.rand(size) + 0.5
    w = torch.tensor(0.3 + 0.01 * seed)
    for _ in range(26):
        mean = _total(x * w) / _total(x)
        w = w - (mean - 3.9 * mean * (1 - mean)) * (1 + fault)
    return w * scale


def ill(size: int, scale: float, seed: int, fault: float) -> Any:
    """A system of equations that is close to having no solution, of sums over ranks."""
    torch.manual_seed(seed)
    x = torch.randn(size) * scale**0.25
    a, b = _total(x * x), _total(x * x * (1 - 1e-4))
    return a / (a - b) * (1 + fault)


def peaked(size: int, scale: float, seed: int, fault: float) -> Any:
    """Softmax of large logits: what is rounded of a logit is a factor of its share."""
    torch.manual_seed(seed)
    x = torch.rand(size) + 0.5
    logits = torch.stack([_total(x * (1 + 1e-4 * i)) for i in range(4)]) * (scale**0.25 / size * 3000)
    return torch.softmax(logits - 100.0, 0) * (1 + fault)


def normed(size: int, scale: float, seed: int, fault: float) -> Any:
    """A variance that is small beside the mean."""
    torch.manual_seed(seed)
    x = torch.randn(size) + 100.0 * scale**0.125 + 0.1
    mean = _total(x) / len(x)
    return (_total(x * x) / len(x) - mean * mean).sqrt() * (1 + fault)


PROGRAMS: tuple[Callable[..., Any], ...] = (cancelling, steep, ill, peaked, normed)
CASES = [(p, size, scale, seed) for seed in range(2) for p in PROGRAMS for size in SIZES for scale in SCALES]


DRAWS = 4
"""Of each case, so that one of them rounds whatever the order in which a machine adds."""


def _drawn(program: Callable[..., Any], size: int, scale: float, seed: int, fault: float) -> Any:
    return [program(size, scale, DRAWS * seed + draw, fault) for draw in range(1 if program is steep else DRAWS)]


def pair(case: tuple[Any, ...], fault: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The program of the ranks and that of one card."""
    return partial(_drawn, *case, fault), partial(_drawn, *case, 0.0)
