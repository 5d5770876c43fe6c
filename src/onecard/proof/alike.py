"""Values to be found by what they are: whole ones, and the blocks of them that ranks hold."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from onecard.proof.whole import apart, scale_of

T = TypeVar("T")
Shape = tuple[int, ...]
Block = tuple[slice, ...]

MOST = 128
"""Blocks of a tensor that are looked at: more ranks than are proved at once, and fewer than a table of numbers has."""


@lru_cache(maxsize=256)  # by size: 8 bytes a number
def _weights(count: int) -> Tensor:
    return torch.randn(
        count, generator=torch.Generator(device="cpu").manual_seed(count), dtype=torch.float64, device="cpu"
    )


@lru_cache(maxsize=4096)
def most_of(count: int) -> float:
    """How much a print can change if each number changes by one."""
    return float(_weights(count).abs().sum())


def _numbers(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double().nan_to_num()


def print_of(x: Tensor) -> float:
    """A number that two tensors of about the same values have about in common."""
    flat = _numbers(x).reshape(-1)
    return float(flat @ _weights(flat.numel())) if flat.numel() else 0.0


class _Sorted(Generic[T]):
    """Prints in order, each with what has it."""

    def __init__(self, found: list[tuple[float, T]]) -> None:
        found.sort(key=lambda pair: pair[0])
        self._prints, self._items = [x for x, _ in found], [item for _, item in found]

    def within(self, mine: float, slack: float) -> list[T]:
        """All whose print is near another one."""
        at = bisect_left(self._prints, mine - slack)
        items = []
        while at < len(self._prints) and self._prints[at] <= mine + slack:
            items.append(self._items[at])
            at += 1
        return items


class Alike(Generic[T]):
    """Things with values, to be found by a value.

    Args:
        things: (name, place in the program, value, thing).
        bound: how far equal values may be apart, relatively to their largest number.

    Example:
        >>> known = Alike([("mul", 0, torch.arange(4.0), "a"), ("mul", 1, torch.ones(4), "b")], 1e-9)
        >>> known.like(torch.ones(4), 0), known.with_block(torch.tensor([2.0, 3.0]), 0, "mul")
        ('b', 'a')
    """

    def __init__(self, things: Sequence[tuple[str, int, Tensor, T]], bound: float) -> None:
        self.bound, self._things = bound, list(things)
        by_size: defaultdict[Hashable, list[tuple[float, int]]] = defaultdict(list)
        for i, (_, _, x, _) in enumerate(self._things):
            by_size[_kind(x)].append((print_of(x), i))
        self._by_size = {key: _Sorted(found) for key, found in by_size.items()}
        self._by_part: dict[Hashable, _Sorted[tuple[int, Block]]] = {}
        self._by_rows: dict[tuple[int, ...], _Sorted[int]] = {}

    def like(self, x: Tensor, near: int, name: str = "") -> T | None:
        """The thing of this value, the one with this name and next to a place before others."""
        return next(iter(self.all_like(x, near, name)), None)

    def all_like(self, x: Tensor, near: int, name: str = "") -> list[T]:
        """All things of these numbers, in that order; those of another shape last: an operator may leave out a view."""
        known = self._by_size.get(_kind(x))
        if known is None:
            return []
        near_by = known.within(print_of(x), self._slack(x, x))
        found = [i for i in near_by if apart(x, self._things[i][2].reshape(x.shape)) <= self.bound]
        shape = squeezed(x)
        found.sort(
            key=lambda i: (
                squeezed(self._things[i][2]) != shape,
                self._things[i][0] != name,
                abs(self._things[i][1] - near),
            )
        )
        return [self._things[i][3] for i in found]

    def with_rows(self, x: Tensor, near: int, name: str = "") -> list[T]:
        """The things of a table's rows, in whatever order, the one with this name and next to a place first.

        Example:
            >>> known = Alike([("index", 0, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a")], 1e-9)
            >>> known.with_rows(torch.tensor([[3.0, 4.0], [1.0, 2.0]]), 0)
            ['a']
        """
        shape = tuple(x.shape)
        if shape not in self._by_rows:
            same = [(i, value) for i, (_, _, value, _) in enumerate(self._things) if tuple(value.shape) == shape]
            marks = [(float(marks_of(value).sum()), i) for i, value in same if value.is_floating_point()]
            self._by_rows[shape] = _Sorted(marks)
        mine = marks_of(x)
        found = self._by_rows[shape].within(float(mine.sum()), self._slack(x, x) * max(len(x), 1))
        found = [i for i in found if apart(_sorted(x), _sorted(self._things[i][2])) <= self.bound]
        found.sort(key=lambda i: (self._things[i][0] != name, abs(self._things[i][1] - near)))
        return [self._things[i][3] for i in found]

    def with_block(self, x: Tensor, near: int, name: str = "") -> T | None:
        """The thing of a name in whose value a rank's part lies; "": of any name."""
        if not x.numel() or not x.dim():
            return None
        key = name, tuple(x.shape), x.is_floating_point()
        if key not in self._by_part:
            self._by_part[key] = _Sorted([*self._blocks(name, x)])
        mine, best = print_of(x), None
        for i, block in self._by_part[key].within(mine, self._slack(x, x)):
            far = abs(self._things[i][1] - near)
            if (best is None or far < best[0]) and _is_block(x, self._things[i][2], block, self.bound):
                best = far, i
        return None if best is None else self._things[best[1]][3]

    def _slack(self, x: Tensor, value: Tensor) -> float:
        numbers = x.numel() * (2 if x.is_complex() else 1)
        return self.bound * max(scale_of(x), scale_of(value)) * most_of(numbers) * 2 + 1e-12

    def _blocks(self, name: str, x: Tensor) -> list[tuple[float, tuple[int, Block]]]:
        found = []
        for i, (other, _, value, _) in enumerate(self._things):
            if name in ("", other) and value.dim() == x.dim() and _kind(value)[1:] == _kind(x)[1:]:
                found += [(mark, (i, block)) for mark, block in _prints(value, tuple(x.shape))]
        return found


def marks_of(x: Tensor) -> Tensor:
    """A number for each row of a table."""
    return _numbers(x) @ _weights(x.shape[1])


def _sorted(x: Tensor) -> Tensor:
    """A table with its rows in the order of their marks."""
    return x[marks_of(x).argsort()]


def squeezed(x: Tensor) -> Shape:
    """Its shape without dims of one: an operator may leave one that another drops."""
    return tuple(size for size in x.shape if size != 1)


def _kind(x: Tensor) -> tuple[int, bool, bool]:
    return x.numel(), x.is_floating_point(), x.is_complex()


def _starts(part: Shape, whole: Shape) -> list[list[int]] | None:
    """Where in each dim blocks may begin, cut as evenly as ranks do; None: nowhere, or there are very many."""
    if any(p > n or not p for p, n in zip(part, whole, strict=True)):
        return None
    starts = [sorted({*range(0, n - p + 1, p), n - p}) for p, n in zip(part, whole, strict=True)]
    return starts if prod(map(len, starts)) <= MOST else None


def _prints(value: Tensor, part: Shape) -> list[tuple[float, Block]]:
    """The prints of all blocks of a shape."""
    starts = _starts(part, tuple(value.shape))
    if starts is None or part == tuple(value.shape):
        return []
    blocks = _numbers(value)
    for dim, (first, length) in enumerate(zip(starts, part, strict=True)):
        at = (torch.tensor(first, device="cpu")[:, None] + torch.arange(length, device="cpu")).reshape(-1)
        blocks = blocks.index_select(2 * dim, at).unflatten(2 * dim, (len(first), length))
    order = [*range(0, 2 * len(part), 2), *range(1, 2 * len(part), 2), *range(2 * len(part), blocks.dim())]
    flat = blocks.permute(order).reshape(prod(map(len, starts)), -1)
    marks = (flat @ _weights(flat.shape[1])).tolist()
    places = product(*starts)
    return [
        (mark, tuple(slice(s, s + p) for s, p in zip(place, part, strict=True)))
        for mark, place in zip(marks, places, strict=True)
    ]


def _is_block(part: Tensor, value: Tensor, block: Block, bound: float) -> bool:
    off = apart(part, value[block])
    return off <= bound or off * scale_of(part, value[block]) <= bound * scale_of(value)


def block_in(part: Tensor, value: Tensor, bound: float) -> Block | None:
    """Where in a value a part of it lies, cut as evenly as ranks do; None: nowhere, or it would be one of very many parts.

    Example:
        >>> block_in(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]), 1e-6)
        (slice(2, 4, None),)
    """
    return next(blocks_in(part, value, bound), None)


def blocks_in(part: Tensor, value: Tensor, bound: float) -> Iterator[Block]:
    """All such places, in order."""
    if part.dim() != value.dim() or not part.dim() or not part.numel():
        return
    starts = _starts(tuple(part.shape), tuple(value.shape))
    if starts is None:
        return
    scale = scale_of(value)
    largest = torch.unravel_index(_size(part).argmax(), part.shape)  # looked for in each block, before all of it is
    grid = value
    for dim, (first, at) in enumerate(zip(starts, largest, strict=True)):
        grid = grid.index_select(dim, torch.tensor(first, device="cpu") + at)
    like = _size(_number(grid) - _number(part)[largest]) <= bound * max(scale, 1e-12)
    for place in like.nonzero().tolist():
        block = tuple(slice(s[i], s[i] + p) for s, i, p in zip(starts, place, part.shape, strict=True))
        if _is_block(part, value, block, bound):
            yield block


def _number(x: Tensor) -> Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double()


def _size(x: Tensor) -> Tensor:
    return _number(x).abs()
