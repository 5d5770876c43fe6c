"""What Python is given of tensors while a step runs: values, and shapes that values decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def item(x: Tensor) -> Any:
    """A counter of one element, read on the host."""
    return x.item()


def chosen_by(mask: Tensor) -> int:
    """How many elements a mask takes."""
    return int(mask.count_nonzero())


VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: item,
    aten.equal.default: aten.equal.default,
    aten.allclose.default: aten.allclose.default,
}
"""Operators that give Python values, and what reads them in a graph."""


def sized_by_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether values decide how large an operator's result is, and not shapes alone."""
    if func is aten.index.Tensor:
        return any(map(_mask, args[1]))
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


def masks(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Those among the operands that decide it, where it is masks."""
    if func is aten.index.Tensor:
        return [x for x in args[1] if _mask(x)]
    return [args[_MASKS[func]]] if func in _MASKS else []


_MASKS = {aten.masked_select.default: 1, aten.nonzero.default: 0, aten.argwhere.default: 0}


def _mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
