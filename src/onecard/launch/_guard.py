"""Ends what a launcher leaves behind that was killed, and had no time to do so itself.

Run by path, as `python _guard.py FOLDER`, in a session of its own: a pipe from the launcher names the ranks that run, and
says when all is in order. A pipe that ends without that word means that the launcher is dead.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_DONE = "done"
_ROUNDS = 20  # looks at the table of processes: one that is killed may just have started another


class SessionGuard:
    """The launcher's end: a process that outlives it for a moment. ``folder`` is removed with it."""

    def __init__(self, folder: str) -> None:
        import subprocess

        nothing = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", __file__, folder]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def __enter__(self) -> SessionGuard:
        return self

    def __exit__(self, *_: object) -> None:
        """All is in order."""
        self._say(_DONE)
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, ranks: Iterable[int]) -> None:
        """These processes, each the leader of a session, are the ranks that run now."""
        self._say(" ".join(map(str, ranks)))

    def _say(self, words: str) -> None:
        with suppress(OSError):  # somebody has killed it: nothing is lost yet
            self._process.stdin.write(f"{words}\n".encode())
            self._process.stdin.flush()


def end_sessions(leaders: Iterable[int]) -> None:
    """Kills the processes of these sessions: a rank leads one, with all that it starts and that makes none of its own."""
    wanted = set(leaders)
    for leader in wanted:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(_ROUNDS):
        left = _members(wanted)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def _members(sessions: set[int]) -> list[int]:
    """The processes of sessions that are not dead already, where the system has a table of them."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, _, _, session, *_ = file.read().rpartition(")")[2].split()
                if int(session) in sessions and state not in "ZX":
                    found.append(int(name))
    return found


def _main(folder: str) -> None:
    ranks: list[int] = []
    for line in sys.stdin:
        if line == f"{_DONE}\n":
            return
        ranks = [int(word) for word in line.split()]
    end_sessions(ranks)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1])
