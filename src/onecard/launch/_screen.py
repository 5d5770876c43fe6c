"""Rank 0's way to the terminal and to its log file at once."""

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

TERMINAL = 1  # standard output of the launcher
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")


class Screen:
    """A file that rank 0 opens by `path`; what it writes appears on the terminal and, as plain text, in `log`.

    The file is a pseudo-terminal where the launcher itself has a terminal, so that progress bars stay alive, else a
    named pipe.
    """

    def __init__(self, log: Path, folder: Path) -> None:
        sys.stdout.flush()
        self._log = _PlainLog(open(log, "wb"))  # noqa: SIM115
        # One writing end stays open here: without it, reading ends at each moment when no rank has the file open.
        self.path, self._read, self._hold = _open_pty() if os.isatty(TERMINAL) else _open_pipe(folder)
        self._thread = threading.Thread(target=self._copy, name="onecard-screen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copies what is left and closes the log; to be called when no rank runs any more."""
        os.close(self._hold)
        self._thread.join(timeout=5.0)  # a process that outlives its rank may hold the file open
        if os.isatty(TERMINAL):
            _show(b"\x1b[?25h\x1b[0m")  # a rank killed under a progress bar leaves the cursor hidden
        self._log.close()

    def _copy(self) -> None:
        with suppress(OSError):  # EIO: a pseudo-terminal that nobody has open any more
            while data := os.read(self._read, 65536):
                self._log.write(data)
                with suppress(BrokenPipeError):  # `| head` has seen enough; the rank runs on
                    _show(data)
        os.close(self._read)


def _show(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(TERMINAL, data) :]
        except BlockingIOError:
            select.select([], [TERMINAL], [])


def _open_pty() -> tuple[str, int, int]:
    reader, writer = os.openpty()
    with suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(TERMINAL, termios.TIOCGWINSZ, bytes(8)))
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once is enough
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    return os.ttyname(writer), reader, writer


def _open_pipe(folder: Path) -> tuple[str, int, int]:
    path = str(folder / "screen")
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # blocking, it would wait here for a writer
    writer = os.open(path, os.O_WRONLY)
    os.set_blocking(reader, True)
    return path, reader, writer


class _PlainLog:
    """Writes a terminal's text without colours, and of a line that was drawn again and again only the last state."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._line = b""

    def write(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._file.writelines(plain_line(line) + b"\n" for line in lines)
        self._line = self._line[self._line.rfind(b"\r", 0, -1) + 1 :]  # what was drawn over is of no more use
        self._file.flush()

    def close(self) -> None:
        if self._line:
            self._file.write(plain_line(self._line) + b"\n")
        self._file.close()


def plain_line(line: bytes) -> bytes:
    r"""Returns what is left to see of a line after its carriage returns and control sequences.

    >>> plain_line(b"\r 10 %\r\x1b[32m 20 %\x1b[0m\r")
    b' 20 %'
    """
    drawn = [part for part in _CONTROL.sub(b"", line).split(b"\r") if part]
    return drawn[-1] if drawn else b""
