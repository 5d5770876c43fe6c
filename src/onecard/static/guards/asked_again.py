"""What a step asks of files, of the process and of objects of C, that can be asked again before a replay."""

from __future__ import annotations

import io
import operator
import os
import pathlib
import string
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch

from onecard.static.guards.lookup import ABSENT, UNKNOWN, Place, attribute

_FILES = (
    os.path.exists, os.path.lexists, os.path.isfile, os.path.isdir, os.path.getsize, os.path.getmtime, os.path.getctime,
    os.listdir, os.stat, os.path.expandvars, os.path.expanduser, os.getcwd,
)  # fmt: skip
"""Functions whose answers are small values."""
_OF_PATHS = ("exists", "is_file", "is_dir", "stat")
_READERS = (numpy.load, numpy.loadtxt, numpy.genfromtxt, numpy.fromfile, torch.load)
"""What reads a file whose name comes first."""
_OF_OBJECTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (threading.Event, ("is_set",)), (type(threading.Lock()), ("locked",)), (io.StringIO, ("getvalue",)),
    (io.BytesIO, ("getvalue", "getbuffer")),
)  # fmt: skip


def question(f: Any, args: list[Any]) -> Callable[[], Any] | None:
    """The same question once more; None of what is none of these, or of arguments that are not known."""
    own, name = getattr(f, "__self__", None), getattr(f, "__name__", "")
    if any(f is g for g in _FILES) and all(isinstance(x, str | os.PathLike) for x in args):
        return partial(_answer, f, *args)
    if isinstance(own, pathlib.Path) and name in _OF_PATHS:
        return partial(_answer, f)
    if any(isinstance(own, kind) and name in names for kind, names in _OF_OBJECTS):
        return own.getvalue if name == "getbuffer" else f  # type: ignore[union-attr]
    return None


def _answer(f: Any, *args: Any) -> Any:
    try:
        found = f(*args)
    except OSError as fault:
        return str(fault)
    if isinstance(found, os.stat_result):  # when somebody has read it changes nothing
        return _changes(found)
    return tuple(found) if isinstance(found, list) else found


def file_that_is_read(f: Any, name: str, args: list[Any]) -> Any:
    """The path that a call opens to read; None of any other call."""
    own = getattr(f, "__self__", None)
    of_path = isinstance(own, pathlib.Path)
    if of_path and name in ("read_text", "read_bytes"):
        return own
    is_reader = any(f is g for g in _READERS)
    if not (is_reader or f is open or f is io.open or (of_path and name == "open")):
        return None
    given: list[Any] = [*([own] if of_path else []), *args, None, None]
    path, mode = given[:2]
    writes = not is_reader and isinstance(mode, str) and bool({*mode} & {*"wax+"})
    return path if isinstance(path, str | os.PathLike) and not writes else None


def state_of(path: Any) -> tuple[int, ...]:
    """What changes of a file when somebody writes to it."""
    try:
        return _changes(os.stat(path))
    except OSError:
        return ()


def _changes(state: os.stat_result) -> tuple[int, ...]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def is_setting(x: Any) -> bool:
    """Whether a module of torch's has settings of the whole process as attributes, which functions of C answer."""
    return isinstance(x, types.ModuleType) and str(vars(x).get("__name__", "")).startswith("torch.backends")


def names_of(f: operator.attrgetter[Any]) -> Iterator[list[str]]:
    """The paths that an ``attrgetter`` follows."""
    reduced: Any = f.__reduce__()
    yield from (path.split(".") for path in reduced[1])


def along(x: Any, path: list[str]) -> Iterator[Place]:
    """Where attributes of attributes are looked up."""
    for name in path:
        found, places = attribute(x, name)
        yield from places
        if found is UNKNOWN or found is ABSENT:
            return
        x = found


def looks_inside(f: Any) -> bool:
    """Whether ``text.format`` asks for attributes or entries of what it is given (``"{0.rate}"``)."""
    own = getattr(f, "__self__", None)
    if not isinstance(own, str) or f.__name__ != "format":
        return False
    try:
        return any(field and ("." in field or "[" in field) for _, field, *_ in string.Formatter().parse(own))
    except ValueError:
        return False
