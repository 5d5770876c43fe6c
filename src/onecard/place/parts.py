"""The dims of a layout: axes that cut a dim in one piece, or the parts of a merged dim. Pure.

A merged dim is what ``x.flatten(0, 1)`` makes of two dims of which the second is cut: a row-major product of parts, each
with its size and the axes that cut it. An ordinary dim is one part, written as its axes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from onecard.place.mesh import ProcessMesh

Axes = tuple[int, ...]
Dim = tuple[Any, ...]  # Axes, outermost first; or, of a merged dim, its Parts
Shape = tuple[int, ...]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of one shard: the one rule for sizes that do not divide.

    Example:
        >>> [chunk(5, 4, i) for i in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def span(size: int, axes: Axes, mesh: ProcessMesh, coordinate: Sequence[int]) -> tuple[int, int]:
    """Offset and length of a rank's stretch of so many indices, cut by these axes in turn."""
    offset, length = 0, size
    for axis in axes:
        start, length = chunk(length, mesh.shape[axis], coordinate[axis])
        offset += start
    return offset, length


class Part(NamedTuple):
    """One factor of a merged dim: its size and the axes that cut it. ``x.flatten(0, 1)`` has a dim of two parts."""

    size: int
    axes: Axes


def is_merged(dim: Dim) -> bool:
    """Whether a dim of a layout consists of several parts."""
    return bool(dim) and type(dim[0]) is Part


def axes_of(dim: Dim) -> Axes:
    """The axes that cut a dim, in one piece or in parts."""
    return tuple(axis for part in dim for axis in part.axes) if is_merged(dim) else dim


def merge(parts: Iterable[tuple[int, Axes]], mesh: ProcessMesh) -> Dim:
    """Parts of at least two indices as a dim: neighbours whose shards are those of one dim become one part.

    Example:
        >>> mesh = ProcessMesh([0, 1], ["x"])
        >>> merge([(4, (0,)), (3, ())], mesh), merge([(5, ()), (2, ()), (4, (0,))], mesh)
        ((0,), (Part(size=10, axes=()), Part(size=4, axes=(0,))))
        >>> merge([(5, (0,)), (6, ())], mesh)  # 18 and 12 of 30, not 15 and 15
        (Part(size=5, axes=(0,)), Part(size=6, axes=()))
    """
    done: list[Part] = []
    for size, axes in parts:
        before = done[-1] if done else Part(1, ())
        outer, inner = (prod(mesh.shape[a] for a in cut) for cut in (before.axes, axes))
        one = before.size % outer == 0 and (inner == 1 or outer == before.size)
        if one or not done:
            done[-1:] = [Part(before.size * size, before.axes + tuple(axes))]
        else:
            done.append(Part(size, tuple(axes)))
    if len(done) < 2:
        return done[0].axes if done else ()
    return tuple(done)


def spread(dim: Dim, sizes: Sequence[int], mesh: ProcessMesh) -> tuple[Axes, ...] | None:
    """The axes of a dim over the factors that it is made of, from the outside in; None if its shards are no product of theirs.

    Example:
        >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
        >>> spread((0, 1), (2, 6), mesh), spread((0, 1), (4, 3), mesh), spread((0,), (3, 4), mesh)
        (((0,), (1,)), ((0, 1), ()), None)
        >>> spread((Part(6, ()), Part(2, (1,))), (3, 2, 2), mesh)
        ((), (), (1,))
    """
    if not is_merged(dim):
        return _spread_part(dim, sizes, mesh)
    found: tuple[Axes, ...] = ()
    for size, axes in dim:
        stop = len(found)
        while stop < len(sizes) and prod(sizes[len(found) : stop]) < size:
            stop += 1
        mine = sizes[len(found) : stop]
        placed = _spread_part(axes, mine, mesh) if prod(mine) == size else None
        if placed is None:
            return None
        found += placed
    return found if len(found) == len(sizes) else None


def _spread_part(axes: Axes, sizes: Sequence[int], mesh: ProcessMesh) -> tuple[Axes, ...] | None:
    found: list[list[int]] = [[] for _ in sizes]
    at, left = 0, sizes[0] if sizes else 1
    for axis in axes:
        while left == 1 and at + 1 < len(sizes):
            at += 1
            left = sizes[at]
        if not sizes or (at + 1 < len(sizes) and left % mesh.shape[axis]):
            return None
        found[at].append(axis)
        left = -(-left // mesh.shape[axis])
    return tuple(map(tuple, found))


def common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """The factors of which two products of the same size are both made, from the outside in; None if they cross each other.

    Example:
        >>> common((4, 6), (8, 3)), common((4, 6), (6, 4))
        ((4, 2, 3), None)
    """
    a, b, found = list(one), list(other), []
    while a and b:
        size = min(a[0], b[0])
        if not size or a[0] % size or b[0] % size:
            return None
        found.append(size)
        for left in (a, b):
            left[0] //= size
            if left[0] == 1:
                left.pop(0)
    return tuple(found) if not a and not b else None
