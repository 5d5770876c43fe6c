"""How the ranks of a group meet: step by step, each step one crossing that nobody leaves before all have come.

In a step every rank writes into its own slot, crosses, and reads the slots of the others. Slots are used in turn, two at
least. That is all the synchronisation there is: a rank that writes for step s+2 has crossed step s+1, so everybody else
has come to s+1, and is done with reading what was written for s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from onecard.comm.base import failed
from onecard.comm.shm import futex, peers
from onecard.comm.shm.segment import (
    ABSENT,
    BELL,
    FAILED,
    GONE,
    HERE,
    PID,
    PROGRESS,
    START,
    STATE,
    STEP,
    Segment,
    rank_word,
)  # fmt: skip
from onecard.comm.shm.signature import SIZE, CollectiveSignature, describe, number
from onecard.errors import CommunicationError

MISMATCH = "the ranks call different collectives"

_MASK, _HALF = 0xFFFFFFFF, 0x80000000
_SPIN = 40  # looks before sleeping, where every rank has a core of its own: 10 to 20 us, about a sleep and a wake


class Channel:
    """One rank's end of a group's segment. Not for two threads at a time.

    Attributes:
        ranks: the members' global ranks, by which errors name them.
        turn: which slot the next step writes.
        failure: why the group can no longer be used, or None.
    """

    def __init__(self, segment: Segment, rank: int, ranks: Sequence[int]) -> None:
        self.segment, self.rank, self.ranks, self.size = segment, rank, tuple(ranks), len(ranks)
        self.pid = os.getpid()
        self.turn = 1
        self.failure: str | None = None
        self._step = self._calls = 0
        self._called = True
        self._signature: CollectiveSignature | None = None
        self._words = segment.words
        self._mine = rank_word(rank, STEP)
        self._others = tuple(rank_word(r, STEP) for r in range(self.size) if r != rank)
        self.bell_address = segment.word_address(BELL)
        self._fence = futex.make_fence()
        self._spin = _SPIN if len(os.sched_getaffinity(0)) >= self.size else 0
        self._turns = segment.plan.turns - 1  # a mask
        turns, members = range(segment.plan.turns), range(self.size)
        self._cards = [[segment.card(r, turn) for r in members] for turn in turns]
        self._slots = [[segment.base + segment.slot(r, turn) for r in members] for turn in turns]

    # -- steps ---------------------------------------------------------------------------------------------------

    def slots(self, turn: int) -> list[int]:
        """The addresses of every rank's slot; turn -1: those before turn 0."""
        return self._slots[turn]

    def buffers(self, count: int, size: int) -> list[int]:
        """The addresses of up to `count` parts of the slots, of `size` bytes, for those who meet before and after using them."""
        self.segment.use_large_pages()
        starts = range(0, self.segment.plan.chunk - size + 1, size)
        return [slot + start for slots in self._slots for slot in slots for start in starts][:count]

    def meet(self, signature: CollectiveSignature, deadline: float, table: bytes = b"") -> None:
        """The first step of a collective: crosses, and checks that all ranks are here for the same thing.

        `table` (8 bytes for each rank) travels along without being compared. Raises CommunicationError.
        """
        self._signature = signature
        card = signature.pack() + table
        start = self._cards[self.turn][self.rank]
        memory = self.segment.bytes
        memory[start : start + len(card)] = card
        cards = self._cards[self.turn]
        self.cross(deadline)
        mine = card[:SIZE]
        for rank, at in enumerate(cards):
            if memory[at : at + SIZE] != mine:
                self._mismatch(rank, mine, bytes(memory[at : at + SIZE]))

    def table(self, rank: int, turn: int) -> memoryview:
        """The table that a rank sent along, one signed 64-bit number for each rank."""
        start = self._cards[turn][rank] + SIZE
        return self.segment.bytes[start : start + 8 * self.size].cast("q")

    def cross(self, deadline: float) -> None:
        """Waits until every rank has come to this step. Raises CommunicationError if one cannot come any more."""
        words = self._words
        step = self._step = (self._step + 1) & _MASK
        self.turn = (step + 1) & self._turns
        words[self._mine] = step
        # Nobody may read the others' words before its own is visible: else the last two could each miss the other.
        self._fence()
        spin, state, looked = self._spin, STATE - STEP, 0.0
        while True:
            bell = words[BELL]
            for other in self._others:
                if (words[other] - step) & _MASK >= _HALF:
                    break
            else:
                break
            if spin:
                spin -= 1
                continue
            now = time.monotonic()
            looked = looked or now
            if words[other + state] != HERE or now - looked >= futex.NAP or now >= deadline:
                self._look([r for r in range(self.size) if self._behind(r, step)], deadline)
                looked = now
            futex.wait(self.bell_address, bell, deadline - now)
            self._fence()
        self._ring(step)

    def _ring(self, step: int) -> None:
        # Every rank that finds all others there might be the last, so it wakes those who sleep. A bell rung once for
        # the step by another one need not ring again.
        words = self._words
        value = step * 2 & _MASK
        if words[BELL] != value:
            words[BELL] = value
            futex.wake(self.bell_address)
        self._fence()

    def _behind(self, rank: int, step: int) -> bool:
        return (self._words[rank_word(rank, STEP)] - step) & _MASK >= _HALF

    # -- progress within a step: where ranks follow each other ------------------------------------------------------

    def progress(self, rank: int) -> int:
        """How far a rank says that it is."""
        return self._words[rank_word(rank, PROGRESS)]

    def advance(self, to: int, call: bool = True) -> None:
        """Says how far this rank is: what it wrote and read before is done. Wakes those who sleep, or leaves it for later."""
        self._fence()
        self._words[rank_word(self.rank, PROGRESS)] = to
        self._called = call
        if call:
            self._fence()
            self.call_all()

    def wait(self, ready: Callable[[], bool], behind: Callable[[], list[int]], deadline: float) -> None:
        """Waits until others have advanced so far that this rank is `ready`.

        `behind`: the ranks that could go on and have not, of which one is to blame for a wait without end. Raises
        CommunicationError if one of them cannot come any more.
        """
        for _ in range(self._spin + 1):
            if ready():
                return self._fence()
        if not self._called:
            self.advance(self.progress(self.rank))
        looked = time.monotonic()
        while True:
            bell = self.bell()
            if ready():
                return self._fence()
            now = time.monotonic()
            if now - looked >= futex.NAP or now >= deadline or self._broken():
                self._look(behind(), deadline)
                looked = now
            futex.wait(self.bell_address, bell, deadline - now)

    # -- faults --------------------------------------------------------------------------------------------------

    def _broken(self) -> bool:
        return any(self._words[rank_word(r, STATE)] != HERE for r in range(self.size))

    def _look(self, missing: list[int], deadline: float) -> None:
        """Raises if somebody that this rank waits for has failed, left or died, or if time is up."""
        words = self._words
        for rank in range(self.size):
            if words[rank_word(rank, STATE)] == FAILED and rank != self.rank:
                self.fail(self.segment.text(rank))
        for rank in missing:
            if words[rank_word(rank, STATE)] == GONE:
                self.fail(f"rank {self.ranks[rank]} is gone: it left the group, or ended, before {self.what()}")
            if not self.lives(rank):
                pid = words[rank_word(rank, PID)]
                self.fail(f"rank {self.ranks[rank]} (process {pid}) died before or in {self.what()}")
        if said := failed.looked():
            self.fail(said)
        if time.monotonic() >= deadline:
            names = ", ".join(f"rank {self.ranks[r]}, {self._whereabouts(r)}" for r in missing)
            self.fail(f"timed out in {self.what()}; missing: {names}")

    def lives(self, rank: int) -> bool:
        """Whether a rank's process runs."""
        start = self._words[rank_word(rank, START)] | self._words[rank_word(rank, START + 1)] << 32
        return rank == self.rank or peers.alive(self._words[rank_word(rank, PID)], start)

    def _whereabouts(self, rank: int) -> str:
        if self._words[rank_word(rank, STEP)] == 0:
            return "which has called no collective of this group yet"
        cards = [bytes(self.segment.bytes[at[rank] : at[rank] + SIZE]) for at in self._cards]
        return f"whose last collective was {describe(max(cards, key=number))}"

    def _mismatch(self, rank: int, mine: bytes, theirs: bytes) -> None:
        self.fail(
            f"{MISMATCH}: rank {self.ranks[self.rank]} {describe(mine)}, rank {self.ranks[rank]} {describe(theirs)}"
            + (", but not for the same" if describe(mine) == describe(theirs) else "")
        )

    def what(self) -> str:
        """The collective under way, for errors."""
        return f"{self._signature} of ranks {list(self.ranks)}"

    def fail(self, reason: str) -> None:
        """Breaks the group, tells all ranks why, and raises CommunicationError."""
        self.leave(FAILED, reason)
        raise CommunicationError(f"{self.failure} (seen on rank {self.ranks[self.rank]})")

    def check(self) -> None:
        """Raises CommunicationError if the group is broken, or if this process is a fork of its rank."""
        if self.failure is not None:
            raise CommunicationError(f"this group of ranks {list(self.ranks)} is broken since: {self.failure}")
        if os.getpid() != self.pid:
            raise CommunicationError(
                f"process {os.getpid()} is a fork of rank {self.ranks[self.rank]} and cannot use its group: "
                "make the process group in the child"
            )

    # -- coming and going ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Says that this rank is here, and which process it is."""
        start = peers.start_time(self.pid)
        for word, value in ((PID, self.pid), (START, start & _MASK), (START + 1, start >> 32)):
            self._words[rank_word(self.rank, word)] = value
        self._fence()
        self._words[rank_word(self.rank, STATE)] = HERE

    def leave(self, state: int = GONE, reason: str = "it was shut down") -> None:
        """Says that this rank takes no further part. Only the first call counts, and none in a forked child."""
        if self.failure is not None or os.getpid() != self.pid:
            return
        self.failure = reason
        if state == FAILED:
            self.segment.set_text(self.rank, reason)
        self._fence()
        self._words[rank_word(self.rank, STATE)] = state
        self.call_all()

    def call_all(self) -> None:
        """Wakes every rank that sleeps, to look again."""
        # A value that the bell has not shown: those of crossings are even, and each rank's odd ones are its own.
        self._calls += 1
        self._words[BELL] = (2 * (self._calls * self.size + self.rank) + 1) & _MASK
        futex.wake(self.bell_address)

    def bell(self) -> int:
        """What the bell shows, to be read before looking at what it is rung for."""
        value = self._words[BELL]
        self._fence()
        return value

    def absent(self) -> list[int]:
        """The ranks that have not entered yet."""
        return [r for r in range(self.size) if self._words[rank_word(r, STATE)] == ABSENT]
