"""torch's caching allocator on paper: what it reserves of a device for tensors that come and go in some order. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

MIB = 2**20
ROUND = 512
"""Bytes: sizes are multiples of it."""
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_SEGMENT, ALONE, ROUND_ALONE = 20 * MIB, 10 * MIB, 2 * MIB
"""Larger tensors than ``SMALL`` share segments of 20 MiB; from ``ALONE`` on each gets one of its own, rounded to 2 MiB."""


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment, from a byte on, between its neighbours."""

    segment: int
    begin: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class CachingAllocator:
    """What one stream of a device has reserved, as torch's allocator does it without settings.

    A tensor gets the smallest free block that is large enough, of equal ones the first, which is divided if much of it is left;
    else a new segment. A
    block that is freed joins its free neighbours. Segments are never given back, so that ``reserved`` is also the most there
    was: torch gives them back only when a device has no more, and then tries again.

    Attributes:
        reserved: bytes of all segments; alive: of tensors, rounded; most: of these at once.

    Source: PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.

    Example:
        >>> memory = CachingAllocator()
        >>> memory.make("a", 30 * MIB), memory.make("b", 11 * MIB), memory.drop("a"), memory.make("c", 16 * MIB)
        (None, None, None, None)
        >>> memory.reserved // MIB  # b has a segment of 12 MiB; c lies where a was, of which 14 MiB are left
        42
        >>> memory.make("d", 15 * MIB)  # does not fit there, though 14 + 1 MiB are free
        >>> memory.reserved // MIB, memory.alive // MIB
        (58, 42)
    """

    def __init__(self) -> None:
        self.reserved = self.alive = self.most = 0
        self._segments = 0
        self._made: dict[Hashable, tuple[_Block, int]] = {}
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        """Of small and of large ones, in order: (size, segment, begin)."""
        self._blocks: dict[tuple[int, int], _Block] = {}

    def make(self, key: Hashable, nbytes: int) -> None:
        """A tensor of so many bytes."""
        if nbytes <= 0:
            return
        wanted = -(-nbytes // ROUND) * ROUND
        block = self._found(wanted) or self._segment(wanted)
        left = block.size - wanted
        if left >= ROUND if block.small else left > SMALL:
            rest = _Block(block.segment, block.begin + wanted, left, block.small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, wanted
            self._offer(rest)
        self._made[key] = block, wanted
        self.alive += wanted
        self.most = max(self.most, self.alive)

    def drop(self, key: Hashable) -> None:
        """A tensor is gone; one that was never made, or is gone, is let be."""
        block, wanted = self._made.pop(key, (None, 0))
        if block is None:
            return
        self.alive -= wanted
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._joined(block, block.after)
        self._offer(block)

    def _found(self, wanted: int) -> _Block | None:
        free = self._free[wanted <= SMALL]
        at = bisect_left(free, (wanted, 0, 0))
        if at == len(free):
            return None
        block = self._blocks[free[at][1:]]
        self._take(block)
        return block

    def _segment(self, wanted: int) -> _Block:
        small = wanted <= SMALL
        size = SMALL_SEGMENT if small else LARGE_SEGMENT if wanted < ALONE else -(-wanted // ROUND_ALONE) * ROUND_ALONE
        self.reserved += size
        self._segments += 1
        return _Block(self._segments, 0, size, small)

    @staticmethod
    def _joined(first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _offer(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.segment, block.begin] = block
        insort(self._free[block.small], (block.size, block.segment, block.begin))

    def _take(self, block: _Block) -> None:
        block.free = False
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.segment, block.begin))]
