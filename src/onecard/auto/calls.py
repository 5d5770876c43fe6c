"""Calls of Python's that reach files, sent to an ``Overlay``: ``open``, those of ``os`` and ``shutil``, torch's own writer."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from onecard.auto.files import Overlay

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READ = ("stat", "lstat", "access", "readlink", "statvfs")
_CHANGED = ("chmod", "utime", "truncate", "setxattr")
_MADE = ("mkdir", "mkfifo", "mknod")


def over(overlay: Overlay, stack: ExitStack) -> None:
    """Send this process's calls to an overlay, until the stack closes."""
    kept = {name: getattr(os, name) for name in (*_READ, *_CHANGED, *_MADE) if hasattr(os, name)}

    def put(holder: Any, name: str, instead: Callable[..., Any]) -> None:
        stack.enter_context(patch.object(holder, name, instead))

    opened = _open(overlay, io.open)
    put(builtins, "open", opened)
    put(io, "open", opened)
    put(os, "open", _os_open(overlay, os.open))
    for name in kept:
        put(os, name, _one(overlay, name, kept[name]))
    for name in ("remove", "unlink", "rmdir"):
        put(os, name, _deleted(overlay, getattr(os, name)))
    for name in ("rename", "replace"):
        put(os, name, _renamed(overlay, getattr(os, name), os.lstat))
    for name in ("link", "symlink"):
        put(os, name, _linked(overlay, getattr(os, name)))
    put(os, "scandir", _scandir(overlay, os.scandir))
    put(os, "listdir", _listed(overlay, os.listdir))
    put(shutil, "rmtree", _tree_deleted(overlay, shutil.rmtree))
    for module in (torch, torch.serialization):
        put(module, "save", _saved(overlay, torch.serialization.save))


def _open(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def open(file: Any, mode: str = "r", *rest: Any, **given: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "tempfile":
            return real(file, mode, *rest, **given)
        if any(letter in mode for letter in "wax+"):
            if "x" in mode:
                _refuse_if_there(overlay, file)
            made = real(overlay.writing(file, "w" not in mode), mode.replace("x", "w"), *rest, **given)
            overlay.opened.add(made)
            return made
        return real(overlay.reading(file), mode, *rest, **given)

    return open


def _refuse_if_there(overlay: Overlay, path: Any) -> None:
    if not isinstance(path, int) and os.path.lexists(overlay.reading(path)):
        raise FileExistsError(17, "File exists", os.fspath(path))


def _os_open(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def open(path: Any, flags: int, *rest: Any, **given: Any) -> int:
        own = sys._getframe(1).f_globals.get("__name__") in ("tempfile", "shutil") or "dir_fd" in given
        if own:
            return real(path, flags, *rest, **given)
        if flags & _WRITES:
            return real(overlay.writing(path, not flags & os.O_TRUNC), flags, *rest, **given)
        return real(overlay.reading(path), flags, *rest, **given)

    return open


def _one(overlay: Overlay, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose first argument is the path."""

    def call(path: Any, *rest: Any, **given: Any) -> Any:
        if given.get("dir_fd") is not None:
            return real(path, *rest, **given)
        if name in _READ:
            return real(overlay.reading(path), *rest, **given)
        return real(overlay.writing(path, name in _CHANGED), *rest, **given)

    return call


def _deleted(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def delete(path: Any, **given: Any) -> None:
        if given.get("dir_fd") is not None:
            return real(path, **given)
        return overlay.delete(path, real)

    return delete


def _renamed(overlay: Overlay, real: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    def rename(source: Any, target: Any, **given: Any) -> None:
        here = overlay.reading(source)
        if here == overlay.mine(source) or overlay.mine(source) is None:
            real(here, overlay.writing(target), **given)
        else:
            look(source)  # says that it is not there
            into = overlay.writing(target)
            if os.path.isdir(source):
                shutil.copytree(source, into, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, into)
        overlay.delete(source, lambda path: None)

    return rename


def _linked(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def link(source: Any, target: Any, *rest: Any, **given: Any) -> None:
        real(source, overlay.writing(target), *rest, **given)

    return link


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


def _scandir(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def scandir(path: Any = ".") -> Any:
        mine = overlay.mine(path)
        if mine is None:
            return real(path)
        names, found = overlay.names(path), {}
        for folder in (path, mine):  # the rank's own take the place of others
            if os.path.isdir(folder):
                with real(folder) as entries:
                    found.update({entry.name: entry for entry in entries if entry.name in names})
        return _Entries(iter(found.values()))

    return scandir


def _listed(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def listdir(path: Any = ".") -> Any:
        return real(path) if overlay.mine(path) is None else sorted(overlay.names(path))

    return listdir


def _tree_deleted(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    def rmtree(path: Any, *rest: Any, **given: Any) -> None:
        mine = overlay.mine(path)
        if mine is None:
            return real(path, *rest, **given)
        if os.path.isdir(mine):
            real(mine, *rest, **given)
        return overlay.delete(path, lambda path: None)

    return rmtree


def _saved(overlay: Overlay, real: Callable[..., Any]) -> Callable[..., Any]:
    """torch writes by a path of its own, in C++."""

    def save(obj: Any, f: Any, *rest: Any, **given: Any) -> None:
        real(obj, overlay.writing(f) if isinstance(f, str | os.PathLike) else f, *rest, **given)

    return save
