"""Files of a program that runs on several ranks as on one: rank 0 writes them; what others write is theirs alone.

Every rank runs the same program, so that each would write each file. Ranks other than 0 write into a folder of their own, which
lies over the disk: what a rank has written it reads there, what it has deleted is gone for it, and what rank 0 has written since
the program began is not there yet. So a program that writes a checkpoint and reads it again finds the same on every rank.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Python's own, which a process sends here once its calls go through an overlay.
_lstat, _stat, _listdir = os.lstat, os.stat, os.listdir


def _is_there(path: Any) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _is_folder(path: Any) -> bool:
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except OSError:
        return False


class Overlay:
    """A rank's own files over the disk.

    Args:
        folder: where they are; since: seconds since the epoch: what is newer on the disk is another rank's.

    Attributes:
        written: the paths that the program has written, in order; opened: the files that it writes.
    """

    def __init__(self, folder: str | Path, since: float | None = None) -> None:
        self.folder = os.path.realpath(folder)
        self.since = time.time() if since is None else since
        self.written: dict[str, None] = {}
        self.opened: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gone: set[str] = set()

    def flush(self) -> None:
        """What files that are still open hold back, at the program's end."""
        for file in list(self.opened):
            with suppress(ValueError, OSError):
                file.flush()

    # -- paths -----------------------------------------------------------------------------------------------------------------

    def mine(self, path: Any) -> str | None:
        """Where a path would be among the rank's own; None of what is no file of the program's: devices, file numbers."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        if text.startswith(("/dev/", "/proc/", "/sys/", self.folder + "/")) or text == os.devnull:
            return None
        return self.folder + text

    def reading(self, path: Any) -> Any:
        """Where a path is read."""
        mine = self.mine(path)
        if mine is None:
            return path
        if _is_there(mine):
            return mine
        if self._is_gone(mine[len(self.folder) :]) or self._is_new(path):
            return mine  # where nothing is: the error names the path below it
        return path

    def writing(self, path: Any, copied: bool = False) -> Any:
        """Where a path is written; ``copied``: with what it holds now."""
        mine = self.mine(path)
        if mine is None:
            return path
        here = self.reading(path)
        folder = os.path.dirname(mine)
        if _is_folder(self.reading(os.path.dirname(os.path.abspath(os.fsdecode(path))) or "/")):
            os.makedirs(folder, exist_ok=True)
        if copied and here is path and _is_there(path) and not _is_folder(path):
            shutil.copyfile(path, mine)
        self.written[mine[len(self.folder) :]] = None
        return mine

    def delete(self, path: Any, remove: Callable[[Any], None]) -> None:
        """Deletes a path, for this rank."""
        here, mine = self.reading(path), self.mine(path)
        if mine is None or here == mine:
            remove(here)
        elif not _is_there(path):
            remove(path)  # says that it is not there
        if mine is not None:
            self._gone.add(mine[len(self.folder) :])

    def names(self, path: Any) -> set[str]:
        """What is in a folder."""
        text, mine = os.path.abspath(os.fsdecode(path)), self.mine(path)
        if mine is None:
            return set(_listdir(path))
        found = set(_listdir(mine)) if _is_folder(mine) else set()
        if not self._is_gone(text) and _is_folder(text):
            found |= {n for n in _listdir(text) if not self._hidden(os.path.join(text, n))}
        elif not _is_folder(mine):
            _listdir(mine)  # says that it is not there
        return found

    def _hidden(self, text: str) -> bool:
        return self._is_gone(text) or self._is_new(text)

    def _is_gone(self, text: str) -> bool:
        while text not in self._gone:
            parent = os.path.dirname(text)
            if parent == text:
                return False
            text = parent
        return True

    def _is_new(self, path: Any) -> bool:
        """Whether another rank has written it since the program began. Of a folder it cannot be told: it is there."""
        try:
            found = _lstat(path)
        except OSError:
            return False
        return not stat.S_ISDIR(found.st_mode) and found.st_ctime > self.since


class Noted(Overlay):
    """Rank 0's: the disk itself, and the paths that the program writes."""

    def __init__(self, since: float) -> None:
        super().__init__("/", since)

    def mine(self, path: Any) -> str | None:
        """None: nothing is its own."""
        return None

    def writing(self, path: Any, copied: bool = False) -> Any:
        """The path."""
        text = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else "/dev/"
        if not text.startswith(("/dev/", "/proc/", "/sys/")):
            self.written[text] = None
        return path
