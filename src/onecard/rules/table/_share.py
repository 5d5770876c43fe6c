"""What reductions and losses have in common: exact casts, means over a part of the elements, empty shards."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from onecard.place.reductions import reduction
from onecard.rules.local import Local


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps every value, so that reducing before it or after it is the same.

    Example:
        >>> widens(torch.bfloat16, torch.float32), widens(torch.float32, torch.bfloat16)
        (True, False)
    """
    if source.is_complex != target.is_complex or source.is_floating_point != target.is_floating_point:
        return False
    return (source is torch.bool) == (target is torch.bool) and torch.promote_types(source, target) is target


def sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether summands of one dtype may be added up as another: the cast is exact, or widens an integer's range."""
    return source is not torch.bool and widens(source, target)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; itself if it has it."""
    return x if x.dtype is dtype else torch.ops.aten._to_copy(x, dtype=dtype)


def wide(x: Tensor) -> Tensor:
    """The tensor in the dtype in which kernels compute: 32 bits for 16."""
    return cast(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def share(c: Local, index: int = 0) -> float:
    """Which part of an operand's elements this rank holds."""
    whole = prod(c.call.operands[index].shape)
    return prod(c.operand_shape(index)) / whole if whole else 1.0


def share_of_factors(c: Local) -> float:
    """Which part of all combinations of the rule's factors this rank works on: of elements after broadcasting."""
    whole = prod(c.bound.sizes)
    return prod(c.lengths()) / whole if whole else 1.0


def scaled(c: Local, part: float, index: int = 0) -> None:
    """Make this rank's result ``part`` times what its operands give (zero for no elements, where a mean is NaN)."""
    if part == 1:
        return
    func, shape, dtype = c.call.func, c.result_shape(index), c.call.results[index].dtype

    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) * part if part else args[0].new_zeros(shape, dtype=dtype)

    c.run = run


def if_empty(c: Local) -> None:
    """Where this rank has no element to reduce, its results are what changes nothing in the reduction that joins them."""
    if prod(c.operand_shape()) or not prod(c.call.operands[0].shape):
        return
    shapes = [c.result_shape(i) for i in range(len(c.call.results))]
    made = [
        (shape, _nothing(op, t.dtype) if prod(shape) else 0, t.dtype)
        for shape, op, t in zip(shapes, c.bound.reduce, c.call.results, strict=True)
    ]

    def run(x: Tensor, *_: Any, **__: Any) -> Any:
        results = tuple(torch.full(shape, value, dtype=dtype, device=x.device) for shape, value, dtype in made)
        return results[0] if len(results) == 1 else results

    c.run = run


def _nothing(op: str, dtype: torch.dtype) -> Any:
    identity = reduction(op).identity
    return identity(dtype) if identity is not None else 0
