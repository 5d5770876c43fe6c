"""Writing by position."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from onecard.rules.samples.data import integers, mask, real


def _distinct(high: int, count: int) -> torch.Tensor:
    return torch.randperm(high)[:count]


def _columns(rows: int, high: int, count: int) -> torch.Tensor:
    """(rows, count) indices, different ones in each row."""
    return torch.stack([_distinct(high, count) for _ in range(rows)])


def _quietly(program: Callable[[], Any]) -> Callable[[], Any]:
    """Without the warnings of operators that torch calls old or new; it gives them once a process."""

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return program()

    return run


SAMPLES = [
    lambda: real(4, 6).scatter(1, _columns(4, 6, 2), real(4, 2)),
    lambda: real(4, 6, grad=False).scatter(1, _columns(3, 6, 2), real(4, 3, grad=False)),
    lambda: real(4, 6).scatter(-1, _columns(4, 6, 1), 2.0),
    lambda: real(4, 6, grad=False).scatter_(0, _columns(6, 4, 3).t(), 2.0),
    lambda: real(4, 6, grad=False).scatter_(1, _columns(4, 6, 2), real(4, 2, grad=False)),
    _quietly(lambda: real(4, 6, grad=False).scatter(1, integers(6, 4, 3), real(4, 3, grad=False), reduce="add")),
    lambda: real(4, 6, grad=False).scatter(1, integers(6, 4, 3), 2.0, reduce="multiply"),
    lambda: real(4, 6).scatter_add(1, integers(6, 4, 5), real(4, 5)),
    lambda: real(4, 6).scatter_add(0, integers(4, 3, 6), real(3, 6)),
    lambda: real(4, 6, grad=False).scatter_add(0, integers(4, 3, 5), real(5, 6, grad=False)),
    lambda: real(4, 6, grad=False).scatter_add_(1, integers(6, 4, 5), real(4, 5, grad=False)),
    lambda: real().scatter_add(0, integers(1), real()),
    *[
        lambda reduce=reduce, include=include: real(4, 6, grad=False).scatter_reduce(
            1, integers(6, 4, 5), real(4, 5, grad=False), reduce, include_self=include
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    ],
    lambda: real(4, 6).index_add(1, integers(6, 3), real(4, 3), alpha=2.0),
    lambda: real(5, 3, grad=False).index_add_(0, integers(5, 4), real(4, 3, grad=False)),
    lambda: real(5).index_add(0, integers(5, 3), real(3)),
    lambda: real(5, 3).index_copy(0, _distinct(5, 2), real(2, 3)),
    lambda: real(5, 3, grad=False).index_copy_(0, _distinct(5, 2), real(2, 3, grad=False)),
    lambda: real(5, 3).index_fill(0, _distinct(5, 2), 1.5),
    lambda: real(5, 3).index_fill(0, _distinct(5, 2), real()),
    lambda: real(5, 3, grad=False).index_fill_(1, _distinct(3, 2), 1.5),
    _quietly(lambda: real(5, 3, grad=False).index_reduce(0, integers(5, 4), real(4, 3, grad=False), "amax")),
    lambda: real(5, 3).index_put((integers(5, 4),), real(4, 3), accumulate=True),
    lambda: real(5, 3).index_put((integers(5, 4, low=-5),), real(3), accumulate=True),
    lambda: real(5, 3).index_put((_distinct(5, 2),), real(2, 3)),
    lambda: real(4, 6, 3).index_put((torch.arange(4), integers(6, 4)), real(4, 3)),
    lambda: real(4, 6, 3).index_put((integers(4, 2), integers(6, 2)), real(), accumulate=True),
    lambda: real(5, 3, grad=False).index_put_((_distinct(5, 2),), real(2, 3, grad=False)),
    lambda: real(4, 3, grad=False).index_put((mask(4, 3),), torch.tensor(2.0).double()),
    lambda: real(4, 3, grad=False).index_put((mask(4),), real(1, grad=False)),
    lambda: torch.ops.aten.index_put(real(5, 4, 3, grad=False), [None, mask(4, 3)], real(grad=False), True),
    lambda: real(4, 3, grad=False).index_put_((mask(4, 3),), real(grad=False)),
    lambda: torch.ops.aten._unsafe_index_put(real(5, 3), [_distinct(5, 2)], real(2, 3)),
    lambda: torch.ops.aten._index_put_impl_(
        real(5, 3, grad=False), [None, integers(3, 2)], real(5, 2, grad=False), True, True
    ),
    lambda: real(4, 3).put(integers(12, 5), real(5), accumulate=True),
    lambda: real(4, 3, grad=False).put_(_distinct(12, 4), real(2, 2, grad=False)),
    lambda: real(4, 3).masked_fill(mask(4, 3), 0.0),
    lambda: real(4, 3).masked_fill(mask(3), float("-inf")),
    lambda: real(4, 1).masked_fill(mask(4, 3), 1.0),
    lambda: real(4, 3).masked_fill(mask(4, 3), real()),
    lambda: real(4, 3, grad=False).masked_fill_(mask(4, 3), 1.0),
    lambda: real(4, 3).masked_scatter(mask(4, 3), real(4, 3)),
]
