"""A checkpoint's tensors as they are wanted: pieces of files, seen through renaming, joining, cutting and turning. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from onecard.checkpoint.format.index import FilePiece, IndexEntry
from onecard.place import boxes
from onecard.place.boxes import Box, meet, volume


@dataclass(frozen=True, slots=True)
class View:
    """A box of a wanted tensor, and where it lies: a part of a piece, whose dims may stand in another order.

    Attributes:
        box: in the wanted tensor.
        piece: what is in the file.
        stored: the shape of the piece in the file.
        start: index of the box's first element in the piece.
        order: for each dim of the wanted tensor, the dim of the piece. Of a dim that is not among them one index is read.
    """

    box: Box
    piece: FilePiece
    stored: tuple[int, ...]
    start: tuple[int, ...]
    order: tuple[int, ...]

    def part(self, need: Box) -> tuple[Box, Box] | None:
        """What of a box of the wanted tensor is in this one: the box, and the ranges of the piece in the file's order."""
        common = meet(self.box, need) if self.box else self.box
        if common is None:
            return None
        ranges = [(a, a + 1) for a in self.start]
        for (a, b), (origin, _), dim in zip(common, self.box, self.order, strict=True):
            ranges[dim] = (self.start[dim] + a - origin, self.start[dim] + b - origin)
        return common, tuple(ranges)


@dataclass(frozen=True, slots=True)
class Virtual:
    """A tensor that can be read.

    Attributes:
        dtype: in the files.
        shape, views: these are all of it.
        beside: others, by their names, that are not read in its place, as they are the same; where they are not, it is told.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    views: tuple[View, ...]
    beside: tuple[tuple[str, Virtual], ...] = ()

    @staticmethod
    def of(entry: IndexEntry) -> Virtual:
        """The tensor as it was saved."""
        order = tuple(range(len(entry.shape)))
        return Virtual(
            entry.dtype,
            entry.shape,
            tuple(View(p.box, p, tuple(b - a for a, b in p.box), (0,) * len(order), order) for p in entry.pieces),
        )

    def turned(self, order: Sequence[int]) -> Virtual:
        """With its dims in another order, as ``permute`` does."""
        views = tuple(
            replace(v, box=tuple(v.box[d] for d in order), order=tuple(v.order[d] for d in order)) for v in self.views
        )
        return Virtual(self.dtype, tuple(self.shape[d] for d in order), views)

    def raised(self, dim: int) -> Virtual:
        """With a new dim of size one, as ``unsqueeze`` gives it. In the file it is the outermost."""
        views = []
        for v in self.views:
            order = [d + 1 for d in v.order]
            order.insert(dim, 0)
            box = (*v.box[:dim], (0, 1), *v.box[dim:])
            views.append(View(box, v.piece, (1, *v.stored), (0, *v.start), tuple(order)))
        return Virtual(self.dtype, (*self.shape[:dim], 1, *self.shape[dim:]), tuple(views))

    def one(self, dim: int, index: int) -> Virtual:
        """One index of a dim, as ``select`` gives it."""
        part = self.cut(dim, index, 1)
        views = tuple(
            replace(v, box=(*v.box[:dim], *v.box[dim + 1 :]), order=(*v.order[:dim], *v.order[dim + 1 :]))
            for v in part.views
        )
        return Virtual(self.dtype, (*self.shape[:dim], *self.shape[dim + 1 :]), views)

    def cut(self, dim: int, start: int, length: int) -> Virtual:
        """So many indices of a dim, as ``narrow`` gives them."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        need = boxes.cut(boxes.whole(self.shape), dim, start, start + length)
        views = []
        for view in self.views:
            found = view.part(need)
            if found is not None:
                box, ranges = found
                views.append(replace(view, box=_moved(box, dim, -start), start=tuple(a for a, _ in ranges)))
        return Virtual(self.dtype, shape, tuple(views))


def joined(parts: Sequence[Virtual], dim: int) -> Virtual:
    """Tensors one after another along a dim, as ``cat`` joins them."""
    views: list[View] = []
    at = 0
    for part in parts:
        for view in part.views:
            views.append(replace(view, box=_moved(view.box, dim, at)))
        at += part.shape[dim]
    shape = parts[0].shape
    return Virtual(parts[0].dtype, (*shape[:dim], at, *shape[dim + 1 :]), tuple(views))


def _moved(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return boxes.cut(box, dim, start + by, stop + by)


def stretches(stored: Sequence[int], ranges: Box, limit: int) -> Iterator[tuple[int, int, Box]]:
    """A box of a row-major array as stretches of it, each of at most ``limit`` elements if a row allows.

    Yields (first element, elements, box): a stretch of consecutive elements of the array that holds the box, a part of
    ``ranges``; it holds more than the box where the box does not have all of the inner dims.

    Example:
        >>> list(stretches((4, 6), ((1, 3), (0, 6)), 100))
        [(6, 12, ((1, 3), (0, 6)))]
        >>> list(stretches((4, 6), ((1, 3), (2, 4)), 3))
        [(8, 2, ((1, 2), (2, 4))), (14, 2, ((2, 3), (2, 4)))]
    """
    if not stored:
        yield 0, 1, ()
        return
    if not volume(ranges):
        return
    first = sum(a * prod(stored[d + 1 :]) for d, (a, _) in enumerate(ranges))
    last = sum((b - 1) * prod(stored[d + 1 :]) for d, (_, b) in enumerate(ranges))
    if last - first + 1 <= limit:
        yield first, last - first + 1, tuple(ranges)
        return
    dim = next(d for d, (a, b) in enumerate(ranges) if b - a > 1)
    start, stop = ranges[dim]
    step = max(1, limit // prod(stored[dim + 1 :]))
    for a in range(start, stop, step):
        yield from stretches(stored, boxes.cut(ranges, dim, a, min(a + step, stop)), limit)
