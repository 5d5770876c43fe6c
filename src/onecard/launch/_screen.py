"""Rank 0's ways to the launcher's outputs and to its log file at once."""

from __future__ import annotations

import fcntl
import os
import re
import select
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

OUTPUT, ERRORS = 1, 2  # of the launcher
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")


class Screen:
    """Files that rank 0 opens as its outputs; what it writes there appears on the launcher's and, as plain text, in `log`.

    Each is a pseudo-terminal where the launcher itself has a terminal, so that progress bars stay alive, else a named pipe.
    Where the launcher's two outputs are one, so are rank 0's: then their lines keep their order.
    """

    def __init__(self, log: Path, folder: Path) -> None:
        sys.stdout.flush()
        self._file, turn = open(log, "wb"), threading.Lock()  # noqa: SIM115
        self._ways = [_Way(OUTPUT, _PlainLog(self._file, turn), folder / "screen")]
        if not _are_one(OUTPUT, ERRORS):
            self._ways.append(_Way(ERRORS, _PlainLog(self._file, turn), folder / "errors"))
        self.path, self.errors = self._ways[0].path, self._ways[-1].path

    def close(self) -> None:
        """Copies what is left and closes the log; to be called when no rank runs any more."""
        for way in self._ways:
            way.close()
        self._file.close()


class _Way:
    """From a file to one of the launcher's outputs and the log."""

    def __init__(self, target: int, log: _PlainLog, pipe: Path) -> None:
        self._target, self._log = target, log
        # One writing end stays open here: without it, reading ends at each moment when no rank has the file open.
        self.path, self._read, self._hold = _open_pty(target) if os.isatty(target) else _open_pipe(str(pipe))
        self._thread = threading.Thread(target=self._copy, name="onecard-screen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._hold)
        self._thread.join(timeout=5.0)  # a process that outlives its rank may hold the file open
        if os.isatty(self._target):
            _show(b"\x1b[?25h\x1b[0m", self._target)  # a rank killed under a progress bar leaves the cursor hidden
        self._log.close()

    def _copy(self) -> None:
        with suppress(OSError):  # EIO: a pseudo-terminal that nobody has open any more
            while data := os.read(self._read, 65536):
                self._log.write(data)
                with suppress(BrokenPipeError):  # `| head` has seen enough; the rank runs on
                    _show(data, self._target)
        os.close(self._read)


def _are_one(first: int, second: int) -> bool:
    """Whether two descriptors are of one file, terminal or pipe; a closed one is taken for the other."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return True


def _show(data: bytes, target: int) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])


def _open_pty(terminal: int) -> tuple[str, int, int]:
    reader, writer = os.openpty()
    with suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once is enough
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    return os.ttyname(writer), reader, writer


def _open_pipe(path: str) -> tuple[str, int, int]:
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # blocking, it would wait here for a writer
    writer = os.open(path, os.O_WRONLY)
    os.set_blocking(reader, True)
    return path, reader, writer


class _PlainLog:
    """Writes a terminal's text without colours, and of a line that was drawn again and again only the last state."""

    def __init__(self, file: BinaryIO, turn: threading.Lock) -> None:
        self._file, self._turn = file, turn
        self._line = b""

    def write(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :]  # what was drawn over is of no more use
        with self._turn:
            self._file.writelines(plain_line(line) + b"\n" for line in lines)
            self._file.flush()

    def close(self) -> None:
        """Write what no line has ended."""
        if self._line:
            with self._turn:
                self._file.write(plain_line(self._line) + b"\n")


def plain_line(line: bytes) -> bytes:
    r"""Returns what is left to see of a line after its carriage returns and control sequences.

    >>> plain_line(b"\r 10 %\r\x1b[32m 20 %\x1b[0m\r")
    b' 20 %'
    """
    drawn = [part for part in _CONTROL.sub(b"", line).split(b"\r") if part]
    return drawn[-1] if drawn else b""
