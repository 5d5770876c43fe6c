"""Rows, columns and single elements of a tensor that is cut: what is written there, each rank writes to its part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.errors import DispatchError
from onecard.place import boxes
from onecard.random import Key
from onecard.rules.call import arguments, schema_of
from onecard.tensor.dist_tensor import DistTensor, describe
from onecard.tensor.random_operators.draw import law_of

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
    spans: boxes.Box
    kept: tuple[int, ...]

    @staticmethod
    def of(base: DistTensor) -> Region:
        """All of a tensor."""
        return Region(base, boxes.whole(base.shape), tuple(range(base.dim())))

    def call(self, func: Any, args: Any, kwargs: Any) -> Region | None:
        """A view of the region, or a write to all of it; None for any other operator."""
        given = arguments(func, args, kwargs)
        if func in (aten.detach.default, aten.alias.default):
            return self
        if func is aten.select.int:
            return self.select(given["dim"], given["index"])
        if func is aten.slice.Tensor:
            return self.slice(given["dim"], slice(given["start"], given["end"], given["step"]))
        if isinstance(given.get("generator"), Key):
            numbers = not any(isinstance(v, Tensor) for v in given.values())
            if not schema_of(func).written or not numbers:
                return None
            self._draw(func, given)
        elif func is aten.zero_.default:
            self.part().zero_()
        elif func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default) and is_number(args[1]):
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
        return replace(self, spans=boxes.cut(self.spans, dim, begin, end))

    def _draw(self, func: Any, given: dict[str, Any]) -> None:
        key = given.pop("generator")
        del given["self"]
        if not self.base._spec.here:
            return
        inside = boxes.clip(self._held(), self.spans)
        offset = [start - begin for (start, _), (begin, _) in zip(inside, self.spans, strict=True)]
        random.fill(self.part(), law_of(func, self.base.dtype, given), key, boxes.shape_of(self.spans), offset)

    def part(self) -> Tensor:
        """This rank's part of the region, with the dims of the base."""
        local, held = self.base._local, self._held()
        return boxes.view(local, held, boxes.clip(self.spans, held)) if self.base._spec.here else local[:0]

    def _held(self) -> boxes.Box:
        """What of the base this rank has."""
        return self.base._spec.layout.box(self.base.shape)


def is_number(value: Any) -> bool:
    """Whether a value fills any part alike: a number, or a plain tensor of one."""
    return not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, DistTensor))
