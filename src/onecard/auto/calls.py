"""Calls of Python's that reach files, sent to an ``Overlay``: ``open``, those of ``os`` and ``shutil``, torch's own writer."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import safetensors
import safetensors.torch
import torch

from onecard.auto import taken
from onecard.auto.files import Overlay

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def over(overlay: Overlay, stack: ExitStack) -> None:
    """Send this process's calls to an overlay, until the stack closes."""
    calls, given = _Calls(overlay), list[taken.Instead]()

    def put(holder: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if hasattr(holder, name):
            given.append((holder, name, _unless_ours(getattr(holder, name), make)))

    opened = calls.open(io.open)
    for module in (builtins, io):
        put(module, "open", lambda real: opened)
    given.append((io, "FileIO", calls.file_io(io.FileIO)))
    put(os, "open", calls.os_open)
    for name in ("stat", "lstat", "access", "readlink", "statvfs", "pathconf", "listxattr", "getxattr"):
        if hasattr(os, name):
            given.append((os, name, calls.looks(getattr(os, name))))
    for name in ("chmod", "utime", "truncate", "setxattr", "removexattr", "chown", "lchown"):
        put(os, name, calls.at(lambda path: overlay.writing(path, True)))
    for name in ("remove", "unlink", "mkfifo", "mknod"):
        put(os, name, calls.at(overlay.changing))
    put(os, "chdir", calls.at(overlay.entering))
    put(os, "getcwd", lambda real: lambda: overlay.seen(real()))
    put(os, "getcwdb", lambda real: lambda: os.fsencode(overlay.seen(os.fsdecode(real()))))
    put(os, "rmdir", calls.at(overlay.moving))
    put(os, "mkdir", calls.mkdir)
    for name in ("rename", "replace"):
        put(os, name, calls.renamed)
    for name in ("link", "symlink"):
        put(os, name, calls.linked)
    put(os, "listdir", calls.listdir)
    put(os, "scandir", calls.scandir)
    put(shutil, "rmtree", calls.at(overlay.deleting))
    for module in (torch, torch.serialization):
        put(module, "save", calls.saved)
        put(module, "load", calls.loaded)
    for module in (safetensors, safetensors.torch):
        put(module, "safe_open", calls.safely)
        put(module, "serialize_file", calls.serialized)
    taken.put(stack, [*given, *_in_classes(given)])


def _in_classes(given: list[taken.Instead]) -> Iterator[taken.Instead]:
    """What classes of Python's own took by name: from 3.13 on, ``Path.glob`` has ``os.scandir`` and ``os.lstat`` so."""
    stand_ins = {id(getattr(holder, name)): instead for holder, name, instead in given}
    for module in ("glob", "pathlib", "pathlib._local", "pathlib._os"):
        for kind in vars(sys.modules.get(module, os)).values():
            if isinstance(kind, type) and kind.__module__ == module:
                held = ((name, getattr(x, "__func__", None)) for name, x in vars(kind).items())
                yield from ((kind, name, staticmethod(stand_ins[id(f)])) for name, f in held if id(f) in stand_ins)


def _unless_ours(
    real: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A call's stand-in, but for ``onecard.checkpoint``: each rank writes its part of one folder, on the disk."""
    instead = make(real)

    def call(*args: Any, **given: Any) -> Any:
        return (real if _is_checkpoints() else instead)(*args, **given)

    return call


def _is_checkpoints() -> bool:
    """Whether a call of ours comes from ``onecard.checkpoint``, by whatever it uses."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("onecard.checkpoint."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_temporary() -> bool:
    """Whether a call of ours comes from ``tempfile``: the name is drawn."""
    return str(sys._getframe(3).f_globals.get("__name__", "")) == "tempfile"


def _is_sockets(depth: int = 3) -> bool:
    """Whether a call of ours comes from ``multiprocessing``: its sockets are this rank's, and made past us."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("multiprocessing.")


class _Calls:
    """What takes the place of Python's calls."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def at(self, place: Callable[[Any], Any]) -> Callable[..., Any]:
        """Of calls whose first argument is the path."""

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any, *rest: Any, **given: Any) -> Any:
                if given.get("dir_fd") is not None or _is_sockets():
                    return real(path, *rest, **given)
                return told(path, real, place(path), *rest, **given)

            return call

        return make

    def looks(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Of calls that change nothing, which an import makes by the thousand: whose they are is asked where it matters."""

        def call(path: Any, *rest: Any, **given: Any) -> Any:
            here = path if given.get("dir_fd") is not None else self.overlay.reading(path)
            if here is path or _is_sockets(2) or _is_checkpoints():
                return real(path, *rest, **given)
            return told(path, real, here, *rest, **given)

        return call

    def open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``open``."""

        def open(file: Any, mode: str = "r", *rest: Any, **given: Any) -> Any:
            made = told(file, real, self._place(file, mode), mode, *rest, **given)
            if _writes(mode):
                self.overlay.opened.add(made)
            return made

        return open

    def _place(self, file: Any, mode: str) -> Any:
        if not _writes(mode):
            return self.overlay.reading(file)
        return self.overlay.changing(file) if "x" in mode else self.overlay.writing(file, "w" not in mode)

    def file_io(self, real: type[io.FileIO]) -> type[io.FileIO]:
        """``io.FileIO``, by itself; what ``open`` makes are such files, too."""
        place, opened = self._place, self.overlay.opened

        class Kind(type):
            def __instancecheck__(cls, x: object) -> bool:
                return isinstance(x, real)

        class FileIO(real, metaclass=Kind):  # type: ignore[valid-type, misc]
            def __init__(self, file: Any, mode: str = "r", *rest: Any, **given: Any) -> None:
                told(file, super().__init__, place(file, mode), mode, *rest, **given)
                if _writes(mode):
                    opened.add(self)

        return FileIO

    def os_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.open``."""

        def open(path: Any, flags: int, *rest: Any, **given: Any) -> Any:
            if given.get("dir_fd") is not None:
                return real(path, flags, *rest, **given)
            if not flags & _WRITES:
                return told(path, real, self.overlay.reading(path), flags, *rest, **given)
            if _is_temporary():
                self.overlay.own.add(os.path.abspath(os.fsdecode(path)))
            return told(path, real, self.overlay.writing(path, not flags & os.O_TRUNC), flags, *rest, **given)

        return open

    def mkdir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.mkdir``."""

        def mkdir(path: Any, *rest: Any, **given: Any) -> None:
            if given.get("dir_fd") is not None:
                return real(path, *rest, **given)
            if _is_temporary():
                self.overlay.own.add(os.path.abspath(os.fsdecode(path)))
            told(path, real, self.overlay.changing(path), *rest, **given)
            return self.overlay.made(path)

        return mkdir

    def renamed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.rename``, ``os.replace``."""

        def rename(source: Any, target: Any, **given: Any) -> None:
            told(source, real, self.overlay.moving(source), self.overlay.moving(target), **given)
            self.overlay.moved(source, target)

        return rename

    def linked(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.link``, ``os.symlink``."""

        def link(source: Any, target: Any, *rest: Any, **given: Any) -> None:
            told(target, real, source, self.overlay.changing(target), *rest, **given)

        return link

    def listdir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.listdir``."""

        def listdir(path: Any = ".") -> list[Any]:
            here = self.overlay.listing(path)
            found = told(path, real, here)
            if isinstance(path, int) or self.overlay.text(here) is None:  # its own copy has nothing of another rank
                return list(found)
            folder = os.path.abspath(os.fsdecode(path))
            return [n for n in found if not self.overlay.is_hidden(os.path.join(folder, os.fsdecode(n)))]

        return listdir

    def scandir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``os.scandir``."""

        def scandir(path: Any = ".") -> Any:
            here = self.overlay.listing(path)
            if here is path and (isinstance(path, int) or not self.overlay.text(path)):
                return real(path)
            with told(path, real, here) as entries:
                shown = [_Entry(entry, os.path.join(os.fsdecode(path), entry.name)) for entry in entries]
            if self.overlay.text(here) is not None:
                shown = [entry for entry in shown if not self.overlay.is_hidden(os.path.abspath(entry.path))]
            return _Entries(iter(shown))

        return scandir

    def saved(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.save``, which writes by a path of its own, in C++."""

        def save(obj: Any, f: Any, *rest: Any, **given: Any) -> None:
            place = self.overlay.writing(f) if isinstance(f, str | os.PathLike) else f
            try:
                told(f, real, obj, place, *rest, **given)
            except RuntimeError as error:  # "Parent directory ... does not exist"
                if place is f:
                    raise
                raise RuntimeError(str(error).replace(os.path.dirname(place), os.path.dirname(f) or ".")) from error

        return save

    def loaded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.load``, which maps a file into memory by its path."""

        def load(f: Any, *rest: Any, **given: Any) -> Any:
            return told(f, real, self.overlay.reading(f) if isinstance(f, str | os.PathLike) else f, *rest, **given)

        return load

    def safely(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """safetensors' reader, in Rust."""

        def safe_open(filename: Any, *rest: Any, **given: Any) -> Any:
            return real(self.overlay.reading(filename), *rest, **given)

        return safe_open

    def serialized(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """safetensors' writer, in Rust."""

        def serialize_file(tensors: Any, filename: Any, *rest: Any, **given: Any) -> None:
            real(tensors, self.overlay.writing(filename), *rest, **given)

        return serialize_file


def _writes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def told(path: Any, real: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """A call; an error of it speaks of the program's path."""
    try:
        return real(*args, **given)
    except OSError as error:
        error.filename = path
        raise


class _Entry:
    """An entry of a folder, under the program's path. Links in this rank's copy of a folder stand for the disk's files."""

    def __init__(self, entry: Any, path: str) -> None:
        self._entry, self.name, self.path = entry, entry.name, path
        self._links = entry.is_symlink()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As ``os.DirEntry``'s; so are the others."""
        if self._links:
            return (os.stat if follow_symlinks else os.lstat)(self.path)
        return self._entry.stat(follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return self._links and self._is(stat.S_ISLNK, False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def __fspath__(self) -> str:
        return self.path


class _Entries:
    """What ``os.scandir`` gives: a context manager of entries."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *fault: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def close(self) -> None:
        """Nothing is open."""
