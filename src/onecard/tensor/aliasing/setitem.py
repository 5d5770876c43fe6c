"""``x[index] = number``: each rank writes to its part, without a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.tensor.aliasing import memory
from onecard.tensor.aliasing.region import Region, is_number
from onecard.tensor.dist_tensor import DistTensor


def _set_item(x: DistTensor, index: Any, value: Any) -> None:
    """Numbers at integers, stretches and one list of indices; all else goes the way of ``index_put_`` and ``copy_``."""
    parts = index if isinstance(index, tuple) else (index,)
    ellipses, picks = sum(p is Ellipsis for p in parts), sum(isinstance(p, Tensor) for p in parts)
    fits = ellipses <= 1 and picks <= 1 and len(parts) - ellipses <= x.dim() and all(map(_is_simple, parts))
    if (
        not fits
        or x._spec.layout.merged
        or not is_number(value)
        or x._is_view()
        or (torch.is_grad_enabled() and x.requires_grad)
    ):
        return torch.Tensor.__setitem__(x, index, value)
    x._refresh()
    memory.check_writable(x, "setitem")
    x.reduce_partial()
    _write(x, parts, value)
    memory.wrote(x)
    torch.autograd.graph.increment_version(x)
    return None


def _write(x: DistTensor, parts: Sequence[Any], value: Any) -> None:
    filled = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    after = parts[filled + 1 :]
    every = [*parts[:filled], *[slice(None)] * (x.dim() - filled - len(after)), *after]
    region, picked = Region.of(x), None
    for dim, part in reversed([*enumerate(every)]):
        if isinstance(part, Tensor):
            picked = (dim, _in_range(part, x.shape[dim]))
        elif isinstance(part, slice):
            region = region.slice(dim, part)
        else:
            region = region.select(dim, int(_in_range(torch.tensor(part, device="cpu"), x.shape[dim])))
    local = region.part()
    if picked is None or not x._spec.here:
        local.fill_(value)
        return
    dim, indices = picked
    indices = indices - x._spec.layout.local_offset(x.shape)[dim]
    local.index_fill_(dim, indices[(indices >= 0) & (indices < local.shape[dim])].to(local.device), value)


def _in_range(index: Tensor, size: int) -> Tensor:
    if bool(((index < -size) | (index >= size)).any()):
        raise IndexError(f"index {index.tolist()} is out of bounds for a dim of size {size}")
    return index % max(size, 1)


def _is_simple(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.dim() == 1 and part.dtype is torch.int64 and not isinstance(part, DistTensor)
    return type(part) is int or part is Ellipsis or (isinstance(part, slice) and part.step in (None, 1))


DistTensor.__setitem__ = _set_item  # type: ignore[assignment, method-assign]
