"""Boxes: parts of a tensor as (start, stop) of each dim, in the whole tensor. Pure.

What a layout gives a rank, what a transfer sends, what a checkpoint writes and a write to a region are all boxes; this is the
one place that intersects them, cuts them and finds one inside a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from onecard.place.parts import chunk

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def cut(box: Box, dim: int, start: int, stop: int) -> Box:
    """A box with another stretch of one dim.

    Example:
        >>> cut(whole((4, 6)), 1, 2, 5)
        ((0, 4), (2, 5))
    """
    return (*box[:dim], (start, stop), *box[dim + 1 :])


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def clip(box: Box, held: Box) -> Box:
    """What of a box is in another one, as a box in that one: empty in the dims that they do not share.

    Example:
        >>> clip(((1, 5), (0, 2)), ((2, 4), (3, 6)))
        ((2, 4), (3, 3))
    """
    starts = [min(max(a, low), high) for (a, _), (low, high) in zip(box, held, strict=True)]
    return tuple((a, max(a, min(b, high))) for a, (_, b), (_, high) in zip(starts, box, held, strict=True))


def split(box: Box, parts: int) -> list[Box]:
    """A box in at most so many parts of about one size, along the first dim that has as many indices, or the longest.

    Example:
        >>> split(((0, 2), (3, 9)), 3)
        [((0, 2), (3, 5)), ((0, 2), (5, 7)), ((0, 2), (7, 9))]
        >>> split((), 3)
        [()]
    """
    lengths = shape_of(box)
    if parts == 1 or not lengths:
        return [box]
    dim = next((d for d, length in enumerate(lengths) if length >= parts), lengths.index(max(lengths)))
    start = box[dim][0]
    cuts = [chunk(lengths[dim], parts, i) for i in range(parts)]
    return [cut(box, dim, start + at, start + at + size) for at, size in cuts if size]


def view(part: Tensor, held: Box, box: Box) -> Tensor:
    """A box inside the part of the whole tensor that holds it.

    Example:
        >>> import torch
        >>> view(torch.arange(6).view(2, 3), ((4, 6), (0, 3)), ((5, 6), (1, 3)))
        tensor([[4, 5]])
    """
    return part[tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(box, held, strict=True))]
