"""Rows, columns and single elements of a tensor that is cut: what is written there, each rank writes to its part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.errors import DispatchError
from onecard.random import Key
from onecard.tensor import memory
from onecard.tensor.chance import arguments, law_of
from onecard.tensor.dist_tensor import DistTensor, describe

aten = torch.ops.aten
VIEWS = (aten.select.int, aten.slice.Tensor)


@dataclass(frozen=True, slots=True)
class Region:
    """A view of a tensor by ``select`` and ``slice``.

    Attributes:
        base: the tensor.
        spans: for each of its dims, where the region begins and ends.
        kept: the dims that the view still has.
    """

    base: DistTensor
    spans: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]

    @staticmethod
    def of(base: DistTensor) -> Region:
        """All of a tensor."""
        return Region(base, tuple((0, n) for n in base.shape), tuple(range(base.dim())))

    def call(self, func: Any, args: Any, kwargs: Any) -> Region | None:
        """A view of the region, or a write to all of it; None for any other operator."""
        given = arguments(func, args, kwargs)
        if func in (aten.detach.default, aten.alias.default):
            return self
        if func is aten.select.int:
            return self.select(given["dim"], given["index"])
        if func is aten.slice.Tensor:
            return self.slice(given["dim"], slice(given["start"], given["end"], given["step"]))
        if isinstance(given.get("generator"), Key) and given.pop("self") is self:
            self._draw(func, given)
        elif func is aten.zero_.default:
            self.part().zero_()
        elif func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default) and _is_number(args[1]):
            self.part().fill_(args[1])
        else:
            return None
        return self

    def read(self) -> Tensor:
        """The values, as a tensor of their own. Writing to it is an error, since it is not the base's memory."""
        value: Any = self.base
        for dim, (begin, end) in enumerate(self.spans):
            value = value.narrow(dim, begin, end - begin)
        for dim in reversed(range(self.base.dim())):
            value = value if dim in self.kept else value.select(dim, 0)
        return value

    def select(self, dim: int, index: int) -> Region:
        """One index of a dim, which is gone then."""
        at = self.kept[dim]
        begin, end = self.spans[at]
        start = begin + index % (end - begin)
        return replace(self._with(at, start, start + 1), kept=tuple(d for d in self.kept if d != at))

    def slice(self, dim: int, wanted: Any) -> Region:
        """A stretch of a dim."""
        at = self.kept[dim]
        begin, end = self.spans[at]
        start, stop, step = wanted.indices(end - begin)
        if step != 1:
            raise DispatchError(f"{describe(self.base)}: a slice with step {step} is not initialised on parts")
        return self._with(at, begin + start, begin + max(start, stop))

    def _with(self, dim: int, begin: int, end: int) -> Region:
        return replace(self, spans=(*self.spans[:dim], (begin, end), *self.spans[dim + 1 :]))

    def _draw(self, func: Any, given: dict[str, Any]) -> None:
        key = given.pop("generator")
        if not self.base._spec.here:
            return
        starts = self.base._spec.layout.local_offset(self.base.shape)
        offset = [max(0, start - begin) for start, (begin, _) in zip(starts, self.spans, strict=True)]
        shape = [end - begin for begin, end in self.spans]
        random.fill(self.part(), law_of(func, self.base.dtype, given), key, shape, offset)

    def part(self) -> Tensor:
        """This rank's part of the region, with the dims of the base."""
        local, spec = self.base._local, self.base._spec
        if not spec.here:
            return local[:0]
        starts = spec.layout.local_offset(spec.shape)
        for dim, ((begin, end), start) in enumerate(zip(self.spans, starts, strict=True)):
            size = local.shape[dim]
            first, last = min(max(begin - start, 0), size), max(min(end - start, size), 0)
            local = local.narrow(dim, first, max(last - first, 0))
        return local


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, DistTensor))


def _set_item(x: DistTensor, index: Any, value: Any) -> None:
    """``x[index] = number``: each rank writes to its part. Other values and indices go the way of ``index_put_`` or ``copy_``."""
    parts = index if isinstance(index, tuple) else (index,)
    ellipses, picks = sum(p is Ellipsis for p in parts), sum(isinstance(p, Tensor) for p in parts)
    fits = ellipses <= 1 and picks <= 1 and len(parts) - ellipses <= x.dim() and all(map(_is_simple, parts))
    if not fits or not _is_number(value) or x._is_view() or (torch.is_grad_enabled() and x.requires_grad):
        return torch.Tensor.__setitem__(x, index, value)
    x._refresh()
    x.settle()
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
            region = region.select(dim, int(_in_range(torch.tensor(part), x.shape[dim])))
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
