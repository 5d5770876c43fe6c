"""The flight board: what each rank of one host is communicating right now, readable from outside and after its death.

Each rank owns one small memory-mapped file and overwrites one record in it, at the cost of a few stores. Nothing is
sent and nothing is synchronised, so a rank that hangs or is killed leaves the truth behind. The idea is that of
PyTorch's NCCL flight recorder, reduced to the last entry and independent of the backend.

Collectives report like this::

    if flight.board.here is not None:
        flight.board.here.enter("all_reduce", group_ranks, nbytes)
    ...
    if flight.board.here is not None:
        flight.board.here.leave()
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard.comm.base.state import Kept

__all__ = ["Board", "FlightEntry", "board", "describe", "last_words", "out_of_step", "overtaken", "rank_text", "read"]

_MAGIC = b"onecard1"
_CURRENT = len(_MAGIC)  # one byte after it: which of two slots holds the entry
_HEAD = struct.Struct("=QQQd?II48s")  # seq, group_seq, nbytes, time, inside, group id and size, name; then the ranks
_STATE = struct.Struct("=d?")  # time, inside: what `leave` rewrites
_STATE_AT = struct.calcsize("=QQQ")
_SLOT = 64 * 1024  # a sparse file: room for groups of 16 000 ranks, and a few pages in use
_SLOTS = (64, 64 + _SLOT)
_ROOM = (_SLOT - _HEAD.size) // 4
_SIZE = 64 + 2 * _SLOT

board: Kept[Board | None] = Kept(lambda: None)
"""The board of this process, or None (the normal case) when nobody watches."""


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """The last collective that a rank entered.

    `seq` counts the collectives of the rank (0: it entered none yet), `group_seq` those of this very group, which is told
    by its members and, as several groups may have the same, by `group`, a hash of its name. `time` is
    `time.monotonic()`, in seconds, of the last change and comparable between the processes of one host.
    """

    seq: int = 0
    group_seq: int = 0
    name: str = ""
    ranks: tuple[int, ...] = ()
    nbytes: int = 0
    inside: bool = False
    time: float = 0.0
    group: int = 0

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What tells its group from all others."""
        return self.ranks, self.group

    def __str__(self) -> str:
        return f"{self.name} #{self.group_seq} of {rank_text(self.ranks)}"


class Board:
    """The writing end of one rank's board.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine = Board.create(f"{folder}/rank0")
    ...     mine.enter("all_reduce", (0, 1), 4096)
    ...     print(read(f"{folder}/rank0"))
    ...     mine.close()
    all_reduce #1 of ranks 0, 1
    """

    def __init__(self, memory: mmap.mmap, path: Path) -> None:
        self._memory, self._path = memory, path
        self._seq = 0
        self._slot = 0
        self._written: list[Sequence[int] | None] = [None, None]
        self._names: dict[str, bytes] = {}
        self.counts: dict[tuple[tuple[int, ...], int], int] = {}
        self.inside = False

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Board:
        """Creates (or empties) the file `path` and returns a board that writes to it. Raises OSError."""
        with open(path, "w+b") as file:
            file.truncate(_SIZE)
            memory = mmap.mmap(file.fileno(), _SIZE)
        memory[: len(_MAGIC)] = _MAGIC
        return cls(memory, Path(path))

    def of(self, rank: int) -> FlightEntry | None:
        """What another rank of this host was in last: the names of their files differ in the rank's number."""
        with suppress(OSError, ValueError):
            return read(self._path.with_name(re.sub(r"\d+", str(rank), self._path.name, count=1)))
        return None

    def enter(self, name: str, ranks: Sequence[int], nbytes: int, group_name: str = "") -> None:
        """Notes that this rank enters collective `name` with the group `ranks` (global ranks) and `nbytes` bytes.

        `group_name`, the same on all ranks, tells apart groups of the same ranks.
        """
        group = ranks if type(ranks) is tuple else tuple(ranks)
        self._seq += 1
        key = group, zlib.crc32(group_name.encode()) if group_name else 0
        count = self.counts[key] = self.counts.get(key, 0) + 1
        encoded = self._names.get(name)
        if encoded is None:
            encoded = self._names[name] = name.encode()[:48]
        # Into the slot that nobody reads; the switch is one byte, so that no reader ever sees half an entry.
        slot = 1 - self._slot
        if group is not self._written[slot]:
            self._write_group(slot, group)
        _HEAD.pack_into(
            self._memory, _SLOTS[slot], self._seq, count, nbytes, time.monotonic(), True, key[1], len(group), encoded
        )
        self._memory[_CURRENT] = self._slot = slot
        self.inside = True

    def leave(self) -> None:
        """Notes that the collective entered last is complete on this rank."""
        self.inside = False
        _STATE.pack_into(self._memory, _SLOTS[self._slot] + _STATE_AT, time.monotonic(), False)

    def close(self) -> None:
        """Unmaps the file; what was written stays readable."""
        self._memory.close()

    def _write_group(self, slot: int, group: tuple[int, ...]) -> None:
        struct.pack_into(f"={min(len(group), _ROOM)}I", self._memory, _SLOTS[slot] + _HEAD.size, *group[:_ROOM])
        self._written[slot] = group


def read(path: str | os.PathLike[str]) -> FlightEntry:
    """Reads the board at `path`, from any process. Raises OSError, or ValueError when the file is not a board."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != _SIZE or file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{os.fspath(path)} is not a flight board; Board.create(path) makes one")
        memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
    with memory:
        for _ in range(100):
            slot = memory[_CURRENT]
            entry = _unpack(memory, _SLOTS[slot])
            if memory[_CURRENT] == slot and _unpack(memory, _SLOTS[slot]).seq == entry.seq:
                break  # else the owner was so quick as to come back to this slot meanwhile
        return entry


def _unpack(memory: mmap.mmap, start: int) -> FlightEntry:
    seq, group_seq, nbytes, when, inside, group, size, name = _HEAD.unpack_from(memory, start)
    ranks = struct.unpack_from(f"={min(size, _ROOM)}I", memory, start + _HEAD.size)
    return FlightEntry(seq, group_seq, name.rstrip(b"\0").decode(errors="replace"), ranks, nbytes, inside, when, group)


def rank_text(ranks: Sequence[int]) -> str:
    """Names ranks briefly.

    >>> rank_text((0, 1, 2, 3)), rank_text((0, 2)), rank_text((5,))
    ('ranks 0-3', 'ranks 0, 2', 'rank 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def overtaken(entry: FlightEntry, finished: Mapping[int, Mapping[tuple[tuple[int, ...], int], int]]) -> list[int]:
    """Returns the ranks that can never join the collective in which `entry` waits.

    `finished` maps each rank that has ended to its `Board.counts`: a rank that ended after fewer collectives on the
    group than the one waited for will not come any more, so the wait is a certain deadlock.

    >>> waits = FlightEntry(5, 3, "all_reduce", (0, 1), 4, True)
    >>> overtaken(waits, {1: {waits.key: 2}})
    [1]
    >>> overtaken(waits, {1: {waits.key: 3}})
    []
    """
    if not entry.inside:
        return []
    return [r for r in entry.ranks if r in finished and finished[r].get(entry.key, 0) < entry.group_seq]


_ALIKE = ("all_reduce", "all_gather", "broadcast")  # collectives to which every rank brings as many bytes


def out_of_step(boards: Mapping[int, FlightEntry], inside: bool = True) -> list[int]:
    """Returns ranks that wait at the same place of one group in different collectives, or with different sizes.

    Their counts are equal, so they mean the same message: they will never understand each other. Not `inside`: also ranks
    that have left it since, by an error.

    >>> both = FlightEntry(5, 3, "all_reduce", (0, 1), 4, True), FlightEntry(9, 3, "all_gather", (0, 1), 4, True)
    >>> out_of_step(dict(enumerate(both)))
    [0, 1]
    >>> out_of_step({0: both[0], 1: both[0]})
    []
    """
    places: dict[tuple[Any, int], dict[tuple[str, int], list[int]]] = {}
    for rank, entry in boards.items():
        if entry.inside or (entry.seq and not inside):
            kind = (entry.name, entry.nbytes if entry.name in _ALIKE else 0)
            places.setdefault((entry.key, entry.group_seq), {}).setdefault(kind, []).append(rank)
    differ = next((kinds for kinds in places.values() if len(kinds) > 1), {})
    return sorted(rank for ranks in differ.values() for rank in ranks)


def last_words(boards: Mapping[int, FlightEntry], ranks: Sequence[int]) -> str:
    """Says which collective each of some ranks was last in, and with how many bytes.

    >>> boards = {rank: FlightEntry(3, 3, "all_reduce", (0, 1), nbytes) for rank, nbytes in enumerate((64, 48))}
    >>> print(last_words(boards, [0, 1]))
      rank 0: all_reduce #3 of ranks 0, 1, 64 bytes
      rank 1: all_reduce #3 of ranks 0, 1, 48 bytes
    """
    return "\n".join(f"  rank {rank}: {boards[rank]}, {boards[rank].nbytes} bytes" for rank in ranks)


def describe(boards: Mapping[int, FlightEntry], now: float | None = None) -> str:
    """Says which ranks wait in which collective, which rank is missing from it, and where that rank is instead.

    `boards` maps each global rank of this host to its entry; `now` (`time.monotonic()`) adds how long ago.

    >>> waits = FlightEntry(7, 7, "all_reduce", (0, 1), 64, True)
    >>> print(describe({0: waits, 1: FlightEntry(6, 6, "all_gather", (0, 1), 64, False)}))
    rank 0 waits in all_reduce #7 of ranks 0, 1 (64 bytes)
      missing: rank 1, which is in no collective; it last left all_gather #6 of ranks 0, 1
    """
    waits: dict[tuple[Any, int, str], list[int]] = {}
    for rank, entry in sorted(boards.items()):
        if entry.inside:
            waits.setdefault((entry.key, entry.group_seq, entry.name), []).append(rank)
    if not waits:
        return "no rank waits in a collective"
    return "\n".join(line for inside in waits.values() for line in _describe_wait(inside, boards, now))


def _describe_wait(inside: list[int], boards: Mapping[int, FlightEntry], now: float | None) -> list[str]:
    entry = boards[inside[0]]
    verb = "waits" if len(inside) == 1 else "wait"
    sizes = sorted({boards[rank].nbytes for rank in inside})
    size = f"{sizes[0]} bytes" if len(sizes) == 1 else f"sizes differ: {_sizes(inside, boards)}"
    since = "" if now is None else f", for {now - min(boards[rank].time for rank in inside):.1f} s"
    lines = [f"{rank_text(inside)} {verb} in {entry} ({size}{since})"]
    for rank in entry.ranks:
        if rank not in inside:
            lines.append(f"  missing: rank {rank}, which {_whereabouts(entry, boards.get(rank), now)}")
    return lines


def _sizes(ranks: Sequence[int], boards: Mapping[int, FlightEntry]) -> str:
    return ", ".join(f"{boards[rank].nbytes} bytes on rank {rank}" for rank in ranks)


def _whereabouts(wanted: FlightEntry, entry: FlightEntry | None, now: float | None) -> str:
    if entry is None:
        return "is not watched from here (another host, or it never started)"
    if entry.seq == 0:
        return "has entered no collective yet"
    if entry.inside:
        differs = entry.key == wanted.key and entry.group_seq == wanted.group_seq
        return f"waits in {entry}" + (" instead" if differs else "")
    ago = "" if now is None else f", {now - entry.time:.1f} s ago"
    return f"is in no collective; it last left {entry}{ago}"
