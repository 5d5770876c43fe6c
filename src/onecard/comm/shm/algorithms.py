"""The collectives, on addresses: four patterns, from which all others are made.

Every function is one collective as one rank runs it, from the first crossing to the last. Large messages go in chunks
that stay in the caches: while the ranks of one step write chunk k, they reduce chunk k-1 and copy chunk k-2 out, so
one crossing a chunk is enough.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from onecard.comm.shm.channel import Channel
from onecard.comm.shm.reduction import Array, Numbers, view
from onecard.comm.shm.relay import relay
from onecard.comm.shm.signature import CollectiveSignature

DIRECT = 32 * 1024
"""Bytes up to which every rank reduces everything itself: one crossing, and n times the reading."""

RELAY = 4 * 1024 * 1024
"""Bytes from which a running total goes from rank to rank: the way with the least traffic, and the longest start."""

Pieces = Sequence[tuple[int, int]]
"""Memory that counts as one stretch: addresses and bytes."""

_move = ctypes.memmove


def barrier(channel: Channel, signature: CollectiveSignature, deadline: float) -> None:
    """Nobody leaves before all have come."""
    channel.meet(signature, deadline)


def all_reduce(
    channel: Channel, signature: CollectiveSignature, deadline: float, numbers: Numbers, receive: bool = True
) -> None:
    """Reduces in place on every rank (without `receive`: takes part, and keeps its own)."""
    size = numbers.count * numbers.itemsize
    if size <= DIRECT:
        turn = channel.turn
        _move(channel.slots(turn)[channel.rank], numbers.address, size)
        channel.meet(signature, deadline)
        if receive and size:
            sources = [view(slot, numbers.count, numbers.kind) for slot in channel.slots(turn)]
            numbers.fold(sources, view(numbers.address, numbers.count, numbers.kind))
        return
    if size >= RELAY:
        return relay(channel, signature, deadline, numbers, receive)
    chunk = channel.segment.plan.chunk // numbers.itemsize
    chunks = [_Chunk(channel, numbers, start, chunk) for start in range(0, numbers.count, chunk)]
    for step in range(len(chunks) + 2):
        turn = channel.turn
        if step < len(chunks):
            chunks[step].write(turn)
        if 1 <= step <= len(chunks):
            chunks[step - 1].reduce(turn)
        if step >= 2 and receive:
            chunks[step - 2].read(turn - 1)
        if step == 0:
            channel.meet(signature, deadline)
        elif step <= len(chunks):
            channel.cross(deadline)


class _Chunk:
    """A part of a large all-reduce that fits into the slots; each rank reduces its own part of it."""

    def __init__(self, channel: Channel, numbers: Numbers, start: int, largest: int) -> None:
        self.channel, self.numbers = channel, numbers
        count = min(largest, numbers.count - start)
        self.address = numbers.address + start * numbers.itemsize
        # Whole cache lines a rank, or two ranks would write into one.
        line = max(64 // numbers.itemsize, 1)
        part = -(-count // (channel.size * line)) * line
        self.bounds = [min(part * r, count) for r in range(channel.size + 1)]

    def write(self, turn: int) -> None:
        """Copies into this rank's slot what the others reduce."""
        slot, size = self.channel.slots(turn)[self.channel.rank], self.numbers.itemsize
        low, high = self.bounds[self.channel.rank] * size, self.bounds[self.channel.rank + 1] * size
        _move(slot, self.address, low)
        _move(slot + high, self.address + high, self.bounds[-1] * size - high)

    def reduce(self, turn: int) -> None:
        """Reduces this rank's part, written a step ago, into the outward half of its slot."""
        rank, numbers = self.channel.rank, self.numbers
        start, count = self.bounds[rank], self.bounds[rank + 1] - self.bounds[rank]
        if count == 0:
            return
        offset = start * numbers.itemsize
        places = [slot + offset for slot in self.channel.slots(turn - 1)]
        places[rank] = self.address + offset
        out = self.channel.slots(turn)[rank] + self.channel.segment.plan.chunk
        numbers.fold([view(p, count, numbers.kind) for p in places], view(out, count, numbers.kind))

    def read(self, turn: int) -> None:
        """Copies the parts that all ranks reduced a step ago to where they belong."""
        size, chunk = self.numbers.itemsize, self.channel.segment.plan.chunk
        for rank, slot in enumerate(self.channel.slots(turn)):
            low, high = self.bounds[rank] * size, self.bounds[rank + 1] * size
            _move(self.address + low, slot + chunk, high - low)


def all_gather(
    channel: Channel,
    signature: CollectiveSignature,
    deadline: float,
    source: int,
    sizes: Sequence[int],
    targets: Sequence[int] | None,
) -> None:
    """Brings `sizes[r]` bytes of each rank r to `targets[r]`; no targets: takes part, and receives nothing."""
    rank, chunk = channel.rank, channel.segment.plan.chunk
    order = [(rank + r) % channel.size for r in range(1, channel.size)]
    for start in range(0, max(*sizes, 1), chunk):
        turn = channel.turn
        mine = min(chunk, sizes[rank] - start)
        if mine > 0:
            _move(channel.slots(turn)[rank], source + start, mine)
        if start:
            channel.cross(deadline)
        else:
            channel.meet(signature, deadline)
        if targets is None:
            continue
        slots = channel.slots(turn)
        for other in order:
            size = min(chunk, sizes[other] - start)
            if size > 0:
                _move(targets[other] + start, slots[other], size)
    if targets is not None and targets[rank] != source:
        _move(targets[rank], source, sizes[rank])


def all_to_all(
    channel: Channel,
    signature: CollectiveSignature,
    deadline: float,
    sources: Sequence[Pieces],
    targets: Sequence[Pieces],
) -> None:
    """Sends what lies at `sources[r]` to each rank r and receives at `targets[r]`: pieces of memory, one after the other."""
    rank, size = channel.rank, channel.size
    sent, received = ([sum(length for _, length in pieces) for pieces in each] for each in (sources, targets))
    room = channel.segment.plan.chunk // size & -64
    start, end = 0, 1
    while start < end:
        turn = channel.turn
        slot = channel.slots(turn)[rank]
        for other in range(size):
            count = min(room, sent[other] - start)
            if count > 0 and other != rank:
                for address, at, length in _between(sources[other], start, count):
                    _move(slot + other * room + at, address, length)
        if start:
            channel.cross(deadline)
        else:
            channel.meet(signature, deadline, np.asarray(sent, np.int64).tobytes())
            end = _check_tables(channel, turn, received)
        for away in range(1, size):
            other = (rank + away) % size
            count = min(room, received[other] - start)
            if count > 0:
                for address, at, length in _between(targets[other], start, count):
                    _move(address, channel.slots(turn)[other] + rank * room + at, length)
        start += room
    if sources[rank] != targets[rank]:
        start = 0
        for given, length in sources[rank]:
            for address, at, part in _between(targets[rank], start, length):
                _move(address, given + at, part)
            start += length


def _between(pieces: Pieces, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Where the bytes from `start` on lie in pieces, `count` of them: addresses, which byte that is, and how many follow."""
    begin = 0
    for address, length in pieces:
        low, high = max(start - begin, 0), min(start + count - begin, length)
        if low < high:
            yield address + low, begin + low - start, high - low
        begin += length


def _check_tables(channel: Channel, turn: int, received: Sequence[int]) -> int:
    """The largest message between any two ranks, once everybody's idea of them agrees with everybody else's."""
    largest = 1
    for other in range(channel.size):
        table = channel.table(other, turn)
        largest = max(largest, *table)
        if table[channel.rank] != received[other]:
            channel.fail(
                f"rank {channel.ranks[other]} sends {table[channel.rank]} bytes to rank "
                f"{channel.ranks[channel.rank]}, which expects {received[other]}, in {channel.what()}"
            )
    return largest


def reduce_scatter(
    channel: Channel,
    signature: CollectiveSignature,
    deadline: float,
    sources: Sequence[int],
    counts: Sequence[int],
    out: Numbers,
) -> None:
    """Reduces `counts[r]` elements, which lie at `sources[r]` on every rank, to rank r's `out`."""
    rank, size, item = channel.rank, channel.size, out.itemsize
    room = channel.segment.plan.chunk // size // 64 * 64 // item
    apart = not _overlap(out.address, sources[rank], out.count * item)
    for start in range(0, max(*counts, 1), room):
        turn = channel.turn
        slots = channel.slots(turn)
        for other in range(size):
            count = min(room, counts[other] - start)
            if count > 0 and not (other == rank and apart):
                _move(slots[rank] + other * room * item, sources[other] + start * item, count * item)
        if start:
            channel.cross(deadline)
        else:
            channel.meet(signature, deadline)
        count = min(room, out.count - start)
        if count > 0:
            places = [slot + rank * room * item for slot in slots]
            if apart:
                places[rank] = sources[rank] + start * item
            parts: list[Array] = [view(place, count, out.kind) for place in places]
            out.fold(parts, view(out.address + start * item, count, out.kind))


def _overlap(one: int, other: int, size: int) -> bool:
    return abs(one - other) < size
