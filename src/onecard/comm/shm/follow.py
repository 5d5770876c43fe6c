"""Large exchanges: every rank writes for the others and reads what they wrote, at its own pace.

Ranks do not meet at every chunk, where each would wait for the slowest each time. Each says how far it is, and may be ahead of
the others by half of the buffers: what a scheduler takes from one rank for a moment costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from onecard.comm.shm.channel import Channel
from onecard.comm.shm.signature import Signature

PIECES = 4
"""Buffers in a slot: small enough to be in the caches still when they are read, and as many as ranks may drift apart."""

Buffers = list[int]  # addresses, one for each rank


def piece(channel: Channel) -> int:
    """The bytes of a buffer, of which each rank has several."""
    return channel.segment.plan.chunk // PIECES & -64


def follow(
    channel: Channel,
    signature: Signature,
    deadline: float,
    chunks: int,
    write: Callable[[int, int], None],
    read: Callable[[int, Buffers], None],
) -> None:
    """An exchange of ``chunks`` chunks: ``write(chunk, buffer)`` on every rank, then ``read(chunk, buffers)``."""
    _Follow(channel, chunks, write, read).run(signature, deadline)


class _Follow:
    """One rank's part.

    At position p a rank writes chunk p into its buffer p mod 2 lag, and reads the others' chunks p - lag. Before that, all
    others must have left position p - lag.

    *Claim: nobody reads what is not there, or writes over what somebody has yet to read.* Who has left position p - lag has
    written chunk p - lag, and has read chunk p - 2 lag, which lay where chunk p is written.
    """

    def __init__(
        self,
        channel: Channel,
        chunks: int,
        write: Callable[[int, int], None],
        read: Callable[[int, Buffers], None],
    ) -> None:
        self.channel, self.chunks, self.write, self.read = channel, chunks, write, read
        channel.segment.use_large_pages()
        size, turns = piece(channel), range(channel.segment.plan.turns)
        self.buffers = [[slot + i * size for slot in channel.slots(turn)] for turn in turns for i in range(PIECES)]
        self.lag = len(self.buffers) // 2
        self.end = chunks + self.lag
        self.position = 0

    def run(self, signature: Signature, deadline: float) -> None:
        channel = self.channel
        channel.advance(0)
        channel.meet(signature, deadline)  # nobody reads the slots any more, and all are at 0
        for position in range(self.end):
            self.position = position
            channel.wait(self._ready, self._behind, deadline)
            self.do(position)
            channel.advance(position + 1, call=position % 2 == 0)
        channel.cross(deadline)

    def do(self, position: int) -> None:
        if position < self.chunks:
            self.write(position, self.buffers[position % len(self.buffers)][self.channel.rank])
        if position >= self.lag:
            chunk = position - self.lag
            self.read(chunk, self.buffers[chunk % len(self.buffers)])

    def _ready(self) -> bool:
        return self.may(self.channel.rank, self.position)

    def may(self, rank: int, position: int) -> bool:
        """Whether a rank can do what it does at a position."""
        progress, least = self.channel.progress, position - self.lag
        return least < 0 or all(progress(r) > least for r in range(self.channel.size) if r != rank)

    def _behind(self) -> list[int]:
        at = [self.channel.progress(rank) for rank in range(self.channel.size)]
        return [r for r, p in enumerate(at) if p < self.end and self.may(r, p)]
