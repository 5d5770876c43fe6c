"""The disk of a run that is proved: what ranks write is gone with it, and none of them overwrites another one's.

A rank finds what it has written itself; else what another rank has; else the disk that the run began with. Programs for one card,
which a plan divides, each write the same files: there nobody finds another rank's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from onecard.auto import calls
from onecard.auto.files import Overlay

# Python's own, which a process sends to a disk once one is in force.
_lstat, _listdir, _mkdir, _makedirs, _readlink, _symlink = (
    os.lstat, os.listdir, os.mkdir, os.makedirs, os.readlink, os.symlink,
)  # fmt: skip


def _state(path: Any) -> os.stat_result | None:
    try:
        return _lstat(path)
    except OSError:
        return None


def _is(path: Any, *kinds: int) -> bool:
    found = _state(path)
    return found is not None and stat.S_IFMT(found.st_mode) in kinds


class Disk(Overlay):
    """One rank's files over the disk.

    Args:
        folder: where what it writes is; others: where what other ranks write is.
    """

    def __init__(self, folder: str | Path, others: Sequence[str | Path] = ()) -> None:
        super().__init__(folder)
        self.others = tuple(os.path.realpath(other) for other in others)

    def text(self, path: Any) -> str | None:
        """As of an overlay; what lies in another rank's folder is none of the program's either."""
        found = super().text(path)
        return None if found is not None and found.startswith(tuple(f"{other}/" for other in self.others)) else found

    def reading(self, path: Any) -> Any:
        """Where a path is read."""
        place, text = super().reading(path), self.text(path)
        if text is None or not self.others or _state(place) is not None:
            return place
        return self._theirs(text) or place

    def changing(self, path: Any) -> Any:
        """Where a path is whose entry in its folder is about to change; another rank's file is then there as a link to it."""
        mine, text = super().changing(path), self.text(path)
        if text is not None and self.others and _state(mine) is None:
            theirs = self._theirs(text)
            if theirs is not None and _is(theirs, stat.S_IFREG) and _is(os.path.dirname(mine), stat.S_IFDIR):
                _symlink(theirs, mine)
        return mine

    def listing(self, path: Any) -> Any:
        """Where a folder is listed: with what other ranks have in it."""
        text = self.text(path)
        found = () if text is None else tuple(each for each in self.others if _is(each + text, stat.S_IFDIR))
        if text is None or not found:
            return super().listing(path)
        self.copy(text)
        for other in found:
            for name in _listdir(other + text):
                here, there = f"{self.folder}{text}/{name}", f"{other}{text}/{name}"
                if _state(here) is None and self._is_made(there):
                    _mkdir(here) if _is(there, stat.S_IFDIR) else _symlink(there, here)
        return self.folder + text

    def copy(self, folder: str) -> None:
        """As of an overlay; a folder that only another rank has made is made here, too."""
        super().copy(folder)
        mine = self.folder + folder
        if self.others and folder not in self._copied and _state(mine) is None and _state(folder) is None:
            theirs = self._theirs(folder)
            if theirs is not None and _is(theirs, stat.S_IFDIR):
                self.copy(os.path.dirname(folder))
                _makedirs(mine, exist_ok=True)
                self._copied.add(folder)

    def seen(self, folder: str) -> str:
        """What the program is told of a folder that it is in."""
        for each in (self.folder, *self.others):
            if folder.startswith(each + "/"):
                return folder[len(each) :]
        return folder

    def _theirs(self, text: str) -> str | None:
        """Where another rank has made what a path names: the newest, if several have; None if none has."""
        found = [other + text for other in self.others if self._is_made(other + text)]
        return max(found, key=lambda place: _lstat(place).st_mtime_ns, default=None)

    def _is_made(self, place: str) -> bool:
        """Whether a rank has made what is there: links to whole paths stand for what is on the disk, or another rank's."""
        return not os.path.isabs(_readlink(place)) if _is(place, stat.S_IFLNK) else _state(place) is not None


def disks(folder: str | Path, world: int, apart: bool) -> list[Disk]:
    """One for each rank, in a folder that goes when the run has ended; ``apart``: nobody finds another rank's files."""
    folders = [Path(folder) / str(rank) for rank in range(world)]
    return [Disk(mine, () if apart else [each for each in folders if each != mine]) for mine in folders]


@contextmanager
def on(disk: Disk) -> Iterator[None]:
    """Inside, this process's files are on a disk."""
    with ExitStack() as stack:
        calls.over(disk, stack)
        yield


class DiskTurn:
    """A rank's disk in a process that has all ranks, entered each time it runs.

    Args:
        shown: the disk that is in force in the process, which is this rank's meanwhile; mine: this rank's.
        around: what else is in force while the rank runs.
    """

    def __init__(self, shown: Disk, mine: Disk, around: AbstractContextManager[Any]) -> None:
        self._shown, self._mine, self._around = shown, mine, around

    def __enter__(self) -> None:
        vars(self._shown).update(vars(self._mine))
        self._around.__enter__()

    def __exit__(self, *fault: Any) -> None:
        self._around.__exit__(*fault)
