"""The memory that the ranks of a group share, and where everything lies in it.

A segment is a memfd: anonymous memory that other processes reach through /proc/PID/fd/N. It never has a name, so
nothing can be left behind, whoever is killed and whenever; it does not count against the size of /dev/shm; only
processes of the same user may open it. Pages come to be when they are first written, so what is not used costs nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

PAGE = 4096
LINE = 64  # bytes of a cache line: words of different writers do not share one

# Words, as indices of 32-bit words. The head: who we are, the bell of the collectives, what the rendezvous decided.
MAGIC, BELL, VERDICT = 0, 16, 32
# For each rank four lines: its step; its state, pid and start time; the bell of its messages; how far it is in a relay.
STEP, STATE, PID, START, MAIL, PROGRESS = 0, 16, 17, 18, 32, 48
_RANK_WORDS, _HEAD_WORDS = 64, 64

ABSENT, HERE, GONE, FAILED = 0, 1, 2, 3
"""The states of a rank: not yet here; taking part; left in good order; broken, with a text that says why."""

TEXT_BYTES = 1024
CARD_BYTES = 64
CHUNK = 1024 * 1024
SPREAD = 8 * 1024 * 1024
"""Bytes over which large messages are spread before a slot is written again. A core that writes into lines which others
have read waits for them to give these up (measured: down to 2.5 GB/s, and 8 GB/s over this many bytes)."""
RING = 1024 * 1024


def _round(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class SegmentLayout:
    """Where things lie, in bytes from the start, for `size` ranks that move `chunk` bytes a step."""

    size: int
    chunk: int = CHUNK
    ring: int = RING

    @cached_property
    def turns(self) -> int:
        """How many slots a rank uses in turn: two at least, a power of two."""
        return 1 << max(SPREAD // (self.size * self.chunk), 2).bit_length() - 1

    @cached_property
    def texts(self) -> int:
        """For each rank, why it failed."""
        return _round(4 * (_HEAD_WORDS + self.size * _RANK_WORDS), PAGE)

    @cached_property
    def card_bytes(self) -> int:
        """A card: a signature, then a table of one number for each rank."""
        return CARD_BYTES + _round(8 * self.size, LINE)

    @cached_property
    def cards(self) -> int:
        """For each rank, its cards, used in turn."""
        return self.texts + _round(self.size * TEXT_BYTES, PAGE)

    @cached_property
    def part(self) -> int:
        """The largest part of a chunk that one rank reduces, in bytes."""
        return _round(-(-self.chunk // self.size), LINE) + LINE

    @cached_property
    def slot_bytes(self) -> int:
        """A slot: a chunk on its way in, and a reduced part on its way out."""
        return _round(self.chunk + self.part, PAGE)

    @cached_property
    def slots(self) -> int:
        """For each rank, its slots, used in turn."""
        return self.cards + _round(self.turns * self.size * self.card_bytes, PAGE)

    @cached_property
    def ring_bytes(self) -> int:
        """A ring: two lines of words, then the bytes under way."""
        return _round(2 * LINE + self.ring, PAGE)

    @cached_property
    def rings(self) -> int:
        """For each pair of sender and receiver, a ring."""
        return self.slots + self.turns * self.size * self.slot_bytes

    @cached_property
    def total(self) -> int:
        """The size of the segment."""
        return self.rings + self.size**2 * self.ring_bytes


def rank_word(rank: int, word: int) -> int:
    """The index of a rank's word."""
    return _HEAD_WORDS + rank * _RANK_WORDS + word


class Segment:
    """A mapped segment: its words, its bytes, and addresses in it.

    Attributes:
        words: all of it as 32-bit words; one index is one load or one store.
        bytes: all of it as bytes.
        base: its address in this process.
    """

    def __init__(self, memory: mmap.mmap, plan: SegmentLayout) -> None:
        self.plan = plan
        self._memory = memory
        self.bytes = memoryview(memory)
        self.words = self.bytes[: plan.texts].cast("I")
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.base = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, plan: SegmentLayout) -> tuple[Segment, int]:
        """A new segment and its descriptor, which is open until everybody has mapped it. Raises OSError."""
        descriptor = os.memfd_create("onecard-shm", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, plan.total)
            return cls(mmap.mmap(descriptor, plan.total), plan), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str, plan: SegmentLayout) -> Segment:
        """Maps the segment of another process. Raises OSError, or ValueError when it is smaller than planned."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(descriptor, plan.total), plan)
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls, plan: SegmentLayout) -> Segment:
        """A segment for a group of one."""
        return cls(mmap.mmap(-1, plan.total), plan)

    def use_large_pages(self) -> None:
        """Asks for slots in pages of 2 MiB, where the system has them: a tenth less time for large tensors.

        Only groups that move such tensors ask: a small one would take 2 MiB for every slot that it touches.
        """
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE, self.plan.slots, self.plan.rings - self.plan.slots)

    def word_address(self, index: int) -> int:
        """The address of a word."""
        return self.base + 4 * index

    def slot(self, rank: int, turn: int) -> int:
        """The offset of a rank's slot."""
        return self.plan.slots + (self.plan.turns * rank + turn) * self.plan.slot_bytes

    def card(self, rank: int, turn: int) -> int:
        """The offset of a rank's card."""
        return self.plan.cards + (self.plan.turns * rank + turn) * self.plan.card_bytes

    def ring(self, sender: int, receiver: int) -> int:
        """The offset of a pair's ring."""
        return self.plan.rings + (sender * self.plan.size + receiver) * self.plan.ring_bytes

    def set_text(self, rank: int, text: str) -> None:
        """Notes why a rank failed."""
        start = self.plan.texts + rank * TEXT_BYTES
        data = text.encode()[: TEXT_BYTES - 1]
        self.bytes[start : start + len(data) + 1] = data + b"\0"

    def text(self, rank: int) -> str:
        """Why a rank failed."""
        start = self.plan.texts + rank * TEXT_BYTES
        return bytes(self.bytes[start : start + TEXT_BYTES]).split(b"\0")[0].decode(errors="replace")
