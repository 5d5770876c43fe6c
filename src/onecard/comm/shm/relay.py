"""A large all-reduce: running totals go from rank to rank, and all copy out what the last one ends.

Each rank reads its numbers once and each byte of shared memory is written by one rank at a time, into lines that it has
just read or that nobody has read for long: the other ways cost more than twice as much between cores.

Ranks do not meet at every chunk. Each says how far it is and follows the one before it: a chunk is small enough to be
in the caches still when it is copied out, and a rank sleeps only when it has nothing to do at all.
"""

from __future__ import annotations

import numpy as np

from onecard.comm.shm.channel import Channel
from onecard.comm.shm.reduction import Array, Numbers, view
from onecard.comm.shm.signature import CollectiveSignature

BLOCK = 128 * 1024
"""Bytes that a core's cache holds twice."""

CHUNK = 512 * 1024
"""Bytes of a running total."""

_move = np.copyto


def relay(channel: Channel, signature: CollectiveSignature, deadline: float, numbers: Numbers, receive: bool) -> None:
    """Reduces in place on every rank (without `receive`: takes part, and keeps its own)."""
    _Relay(channel, numbers, receive).run(signature, deadline)


class _Relay:
    """One rank's part.

    At position p a rank adds its numbers to the total of chunk p, and copies chunk p - lag out. Before that, the rank before it
    must have left position p, and the last rank position p - lag.

    *Claim: with 2 lag buffers, the first rank never writes over a total that somebody has yet to copy.* When it is at
    p, the last rank has left p - lag, and so have all, as each follows the one before it; what they copied there was chunk
    p - 2 lag.
    """

    def __init__(self, channel: Channel, numbers: Numbers, receive: bool) -> None:
        self.channel, self.numbers, self.receive = channel, numbers, receive
        self.rank, self.last = channel.rank, channel.size - 1
        kind = np.dtype(numbers.fold.total)
        self.most = CHUNK // kind.itemsize
        self.chunks = -(-numbers.count // self.most)
        # As many chunks under way as there are ranks, so that all have work, and as many that make up for uneven paces.
        places = channel.buffers(4 * channel.size, CHUNK)
        self.lag = len(places) // 2
        self.totals = [view(place, self.most, kind) for place in places]
        self.results = [view(place, self.most, numbers.kind) for place in places]
        self.mine = view(numbers.address, numbers.count, numbers.kind)
        self.fold_in = numbers.fold.add if self.rank else numbers.fold.begin
        self.position = 0

    def run(self, signature: CollectiveSignature, deadline: float) -> None:
        channel = self.channel
        channel.advance(0)
        channel.meet(signature, deadline)  # nobody reads the slots any more, and all are at 0
        for position in range(self.chunks + self.lag):
            self.position = position
            channel.wait(self._ready, self._behind, deadline)
            if self.receive and position >= self.lag and self.rank < self.last:
                self._copy(position - self.lag)
            if position < self.chunks:
                self._add(position)
            # Those who sleep are woken now and then, so that they find work for a while; the last chunk is no special
            # case, as positions go on for longer than that.
            channel.advance(position + 1, call=position % channel.size == 0)
        channel.cross(deadline)

    def _ready(self) -> bool:
        return self._may(self.rank, self.position)

    def _may(self, rank: int, position: int) -> bool:
        """Whether a rank can do what it does at a position."""
        progress = self.channel.progress
        if progress(self.last) <= position - self.lag:
            return False
        return rank == 0 or position >= self.chunks or progress(rank - 1) > position

    def _behind(self) -> list[int]:
        at = [self.channel.progress(rank) for rank in range(self.channel.size)]
        return [r for r, p in enumerate(at) if p < self.chunks + self.lag and self._may(r, p)]

    def _find(self, places: list[Array], chunk: int) -> tuple[Array, Array]:
        """A chunk in shared memory, and this rank's numbers of it."""
        mine = self.mine[chunk * self.most : (chunk + 1) * self.most]
        return places[chunk % len(places)][: len(mine)], mine

    def _add(self, chunk: int) -> None:
        total, mine = self._find(self.totals, chunk)
        if self.rank == self.last:
            self._end(total, mine)
        else:
            self.fold_in(total, mine)

    def _end(self, total: Array, mine: Array) -> None:
        """The last rank's part. It copies the result out at once, block by block, while it has it in its cache."""
        fold, ranks = self.numbers.fold, self.channel.size
        packs = total.itemsize != mine.itemsize  # and so moves the result to the front
        block = len(mine) if packs else BLOCK // mine.itemsize
        for start in range(0, len(mine), block):
            here, part = total[start : start + block], mine[start : start + block]
            self.fold_in(here, part)
            fold.finish(here, ranks)
            if self.receive:
                _move(part, here.view(part.dtype)[: len(part)])

    def _copy(self, chunk: int) -> None:
        result, mine = self._find(self.results, chunk)
        _move(mine, result)
