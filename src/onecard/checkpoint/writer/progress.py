"""What a save shows while it runs: bytes and GB/s, where rank 0 has a terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from onecard.comm.world import world

WORTH_A_BAR = 256 << 20  # bytes


class Progress:
    """A bar while a large file is written, and a line when all is done; nothing where no person looks."""

    def __init__(self, what: str, size: int, live: bool = True) -> None:
        self._shown = world.get_rank() == 0 and sys.stdout.isatty()
        self._bar: Any = None
        if self._shown and live and size >= WORTH_A_BAR:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, transient=True)
            self._task = self._bar.add_task(what, total=size)

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            try:
                self._bar.start()
            except LiveError:  # the program has a bar of its own
                self._bar = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(LiveError):
                self._bar.stop()

    def end(self, path: Path, nbytes: int, seconds: float) -> None:
        """The line at the end; ``nbytes`` of all ranks, which rank 0 knows."""
        if self._shown:
            Console().print(
                f"saved {path}: {nbytes / 1e9:,.2f} GB in {seconds:.1f} s, {nbytes / 1e9 / max(seconds, 1e-9):,.2f} GB/s",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
