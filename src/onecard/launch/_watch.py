"""Watches the flight boards of this machine's ranks: ranks that are out of step are ended, and told why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from onecard.comm.base import flight

PAUSE = 0.5  # seconds between two looks
PATIENCE = (
    2.0  # seconds for which ranks must be out of step: those that compare what they call say more about it themselves
)
ADVICE = (
    "They cannot understand each other: every rank must run the same operators in the same order, on tensors of the same shape. "
    "Run it again with ONECARD_CHECK=1 to see both lines of your program."
)


class BoardWatch:
    """Looks at the boards in a folder, one file for each rank; notes of failures go beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self._stuck: tuple[object, float] = (None, 0.0)  # the entries of the ranks out of step, and since when

    def board(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.board"

    def boards(self, ranks: Iterable[int]) -> dict[int, flight.FlightEntry]:
        """The boards of those ranks that have one."""
        found = {}
        for rank in ranks:
            with suppress(OSError, ValueError):
                found[rank] = flight.read(self.board(rank))
        return found

    def look(self, pids: Mapping[int, int]) -> None:
        """Ends one of the ranks that are out of step, with a note; the agent then ends the others. ``pids``: by rank."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PAUSE
        boards = self.boards(pids)
        stuck = flight.out_of_step(boards)
        entries = [boards[rank] for rank in stuck]
        if entries != self._stuck[0]:
            self._stuck = entries, now
        if stuck and now - self._stuck[1] >= PATIENCE:
            text = f"onecard.errors.CommunicationError: ranks are out of step\n{flight.describe(boards)}\n{ADVICE}"
            note = {"time": now, "text": text, "message": "", "code": 1}
            (self._folder / f"rank{stuck[0]}.json").write_text(json.dumps(note))
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pids[stuck[0]], signal.SIGKILL)
