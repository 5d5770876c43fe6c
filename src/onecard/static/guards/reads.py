"""What Python is given of tensors while a step runs: values, and shapes that values decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import no_fakes, tree_leaves, tree_map

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


def stand_in(dtype: torch.dtype) -> Any:
    """What Python is given in place of a number that is not computed.

    Example:
        >>> stand_in(torch.float32), stand_in(torch.int64), stand_in(torch.bool)
        (1.0, 1, False)
    """
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1 + 0j if dtype.is_complex else 1


def guessed(func: Any, args: Sequence[Any]) -> Any:
    """What an operator that gives a Python value is taken to give where no data is."""
    return _number(args[0]) if func is aten._local_scalar_dense.default else True


def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Remember what a comparison says of stand-ins: a number is itself, and finite, and in its range."""
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        result._stand_in = _answer(func, args, kwargs)  # type: ignore[attr-defined]


def _number(x: Tensor) -> Any:
    return getattr(x, "_stand_in", stand_in(x.dtype))


def _answer(func: Any, args: Any, kwargs: Any) -> bool:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype == torch.bool]
    with no_fakes(), suppress(RuntimeError, IndexError, TypeError, ValueError):
        args, kwargs = tree_map(
            lambda x: torch.tensor(_number(x), dtype=x.dtype, device="cpu") if isinstance(x, Tensor) else x,
            (args, kwargs),
        )
        return bool(func(*args, **kwargs))
    return _number(given[0]) if given else False  # of other sizes: a view


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
