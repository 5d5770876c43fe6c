"""Files of a program that runs on several ranks as on one: rank 0 writes them; what others write is theirs alone.

Every rank runs the same program, so that each would write each file. A rank other than 0 has a copy of each folder that it
changes, in which files that it has not written are links to the disk's; what it does there, the file system does. What rank 0 has
written since the program began is not in it. So a program that writes a checkpoint and reads it finds the same on every rank.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import stat
import struct
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

# Python's own, which a process sends here once its calls go through an overlay.
_lstat, _stat, _listdir, _mkdir, _symlink, _unlink, _readlink, _cwd = (
    os.lstat, os.stat, os.listdir, os.mkdir, os.symlink, os.unlink, os.readlink, os.getcwd,
)  # fmt: skip
_open = io.open
_LIBC = ctypes.CDLL(None)
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _STATX_BTIME = -100, 0x100, 0x800
_SYSTEM = ("/dev/", "/proc/", "/sys/")


def _kind(path: str) -> int:
    """The kind of what is there, a link as such; 0 if nothing is."""
    try:
        return stat.S_IFMT(_lstat(path).st_mode)
    except OSError:
        return 0


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except OSError:
        return False


def born(folder: str) -> float:
    """When a folder was made, in seconds since the epoch; 0 where the system does not say: it was always there."""
    room = ctypes.create_string_buffer(256)  # struct statx
    if not hasattr(_LIBC, "statx"):
        return float(getattr(_lstat(folder), "st_birthtime", 0.0))
    if _LIBC.statx(_AT_FDCWD, os.fsencode(folder), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, room):
        return 0.0
    known, seconds, parts = (struct.unpack_from(form, room, at)[0] for form, at in (("I", 0), ("q", 80), ("I", 88)))
    return seconds + parts / 1e9 if known & _STATX_BTIME else 0.0


class Overlay:
    """A rank's own files over the disk.

    Args:
        folder: where its copies of folders are; since: seconds since the epoch: what is newer on the disk is another rank's.

    Attributes:
        written: the paths that the program has written, in order; opened: the files that it writes;
            own: paths on the disk of this rank alone: temporary ones, whose names nobody else has.
    """

    def __init__(self, folder: str | Path, since: float | None = None) -> None:
        self.folder = os.path.realpath(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.since = time.time() if since is None else since
        self.written: dict[str, None] = {}
        self.opened: weakref.WeakSet[Any] = weakref.WeakSet()
        self.own: set[str] = set()
        self._copied: set[str] = set()
        self._passed = (*_SYSTEM, self.folder + "/")

    def flush(self) -> None:
        """What files that are still open hold back, at the program's end."""
        for file in list(self.opened):
            with suppress(ValueError, OSError):
                file.flush()

    # -- paths -----------------------------------------------------------------------------------------------------------------

    def text(self, path: Any) -> str | None:
        """A path of the program's files; None of what is none: devices, file numbers, this rank's own."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        if text == self.folder or text.startswith(self._passed):
            return None
        return None if any(text == each or text.startswith(each + "/") for each in self.own) else text

    def reading(self, path: Any) -> Any:
        """Where a path is read."""
        text = self.text(path)
        if text is None:
            return path
        if not self._is_governed(text):
            return self.folder + text if self._is_new(text) else self._on_disk(path, text)
        mine = self.folder + text
        return _readlink(mine) if _kind(mine) == stat.S_IFLNK and self._is_ours(mine) else mine

    def writing(self, path: Any, kept: bool = False) -> Any:
        """Where a path is written; ``kept``: what it holds now stays."""
        text = self.text(path)
        if text is None:
            return path
        mine = self.changing(text)
        if _kind(mine) == stat.S_IFLNK and self._is_ours(mine) and not _is_folder(mine):
            source = _readlink(mine)
            _unlink(mine)
            if kept:
                with _open(source, "rb") as old, _open(mine, "wb") as new:
                    shutil.copyfileobj(old, new)
        self.written[text] = None
        return mine

    def changing(self, path: Any) -> Any:
        """Where a path is whose entry in its folder is about to change: made, removed, renamed."""
        text = self.text(path)
        if text is None:
            return path
        self.copy(os.path.dirname(text))
        return self.folder + text

    def moving(self, path: Any) -> Any:
        """``changing``, with all that is below it."""
        text = self.text(path)
        if text is None:
            return path
        mine = self.changing(text)
        waiting = [text] if _is_folder(mine) else []
        while waiting:
            folder = waiting.pop()
            self.copy(folder)
            names = _listdir(self.folder + folder)
            waiting += [f"{folder}/{n}" for n in names if _kind(f"{self.folder}{folder}/{n}") == stat.S_IFDIR]
        return mine

    def deleting(self, path: Any) -> Any:
        """Where a folder is that goes with all that is in it."""
        mine = self.moving(path)
        if mine is not path and _kind(mine) and not _is_folder(mine):
            raise NotADirectoryError(20, "Not a directory", path)
        return mine

    def listing(self, path: Any) -> Any:
        """Where a folder is listed; what ``is_hidden`` says is not in it."""
        text = self.text(path)
        if text is None or not (self._is_governed(text) or text in self._copied):
            return path if text is None else self._on_disk(path, text)
        self.copy(text)
        return self.folder + text

    def entering(self, path: Any) -> Any:
        """Where a folder is that becomes the present one: the disk's, unless this rank has made or changed it."""
        text = self.text(path)
        if text is None:
            return path
        is_disks = text not in self._copied and _is_folder(text) and not self._is_new(text)
        return text if is_disks and not self._is_gone(text) else self.reading(path)

    def seen(self, folder: str) -> str:
        """What the program is told of a folder that it is in: its own path, also of a copy."""
        return folder[len(self.folder) :] if self.folder and folder.startswith(self.folder + "/") else folder

    def _on_disk(self, path: Any, text: str) -> Any:
        """A path as it was given, unless the present folder is a copy, from which a relative one leads elsewhere."""
        return text if _cwd().startswith(self.folder + "/") else path

    def is_hidden(self, path: str) -> bool:
        """Whether an entry of a folder of the disk is another rank's."""
        return self.text(path) is not None and self._is_new(path)

    def made(self, path: Any) -> None:
        """A folder has been made: all that is in it is this rank's."""
        if (text := self.text(path)) is not None:
            self._copied.add(text)
            self.written[text] = None

    def moved(self, source: Any, target: Any) -> None:
        """A folder has another name."""
        old, new = self.text(source), self.text(target)
        if old is not None and new is not None:
            below = [each for each in self._copied if each == old or each.startswith(old + "/")]
            self._copied.update(new + each[len(old) :] for each in below)
            self.written[new] = None

    # -- copies of folders -----------------------------------------------------------------------------------------------------

    def copy(self, folder: str) -> None:
        """This rank gets its own copy of a folder, if there is one: files as links; folders in it are copied when it is time."""
        mine = self.folder + folder
        if folder in self._copied:
            return
        if self._is_governed(folder):
            if _kind(mine) == stat.S_IFLNK and _is_folder(mine):
                _unlink(mine)
                _mkdir(mine)
            if _kind(mine) != stat.S_IFDIR:
                return  # what is done in it says so
        elif _is_folder(folder):
            os.makedirs(mine, exist_ok=True)
        else:
            return
        for name in _listdir(folder):
            real, here = os.path.join(folder, name), os.path.join(mine, name)
            if not _kind(here) and not self._is_new(real) and self.text(real) is not None:
                _mkdir(here) if _kind(real) == stat.S_IFDIR else _symlink(real, here)
        self._copied.add(folder)

    def _is_governed(self, text: str) -> bool:
        """Whether a path is what this rank's copies say: it has one of the folder, or one from which the way there is gone."""
        if not self._copied:
            return False
        below, folder = text, os.path.dirname(text)
        while folder not in self._copied:
            if folder == os.path.dirname(folder):
                return False
            below, folder = folder, os.path.dirname(folder)
        return below == text or _kind(self.folder + below) not in (stat.S_IFDIR, stat.S_IFLNK)

    def _is_gone(self, text: str) -> bool:
        """Whether this rank's copies say that nothing is there."""
        return self._is_governed(text) and not _kind(self.folder + text)

    def _is_ours(self, link: str) -> bool:
        """Whether a link was made by ``copy``: to the place of the disk where something is."""
        target = _readlink(link)
        return os.path.isabs(target) and not target.startswith(self.folder)

    def _is_new(self, text: str) -> bool:
        """Whether another rank has made it since the program began."""
        try:
            found = _lstat(text)
        except OSError:
            return False
        if found.st_ctime <= self.since:  # a folder was made before it was last changed
            return False
        return not stat.S_ISDIR(found.st_mode) or born(text) > self.since


class Noted(Overlay):
    """Rank 0's: the disk itself, and the paths that the program writes."""

    def __init__(self) -> None:
        self.since, self.folder, self.own, self._copied = 0.0, "", set(), set()
        self.written, self.opened = {}, weakref.WeakSet()

    def text(self, path: Any) -> str | None:
        """None: nothing is its own."""
        return None

    def writing(self, path: Any, kept: bool = False) -> Any:
        """The path."""
        text = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else "/dev/"
        if not text.startswith(_SYSTEM):
            self.written[text] = None
        return path

    def moved(self, source: Any, target: Any) -> None:
        """A file that was written under another name."""
        self.writing(target)
