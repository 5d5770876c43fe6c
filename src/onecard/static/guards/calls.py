"""What a call of a function of C, torch or NumPy looks at: the containers that it is given, and the one whose method it is."""

from __future__ import annotations

import collections.abc
import concurrent.futures
import contextvars
import copy
import dataclasses
import functools
import io
import logging
import operator
import os
import pathlib
import random
import threading
import types
from typing import Any

import numpy
import torch
from torch import nn

from onecard.static.guards.asked_again import along, file_that_is_read, looks_inside, names_of, question, state_of
from onecard.static.guards.chains import Expr, text
from onecard.static.guards.lookup import (
    ABSENT,
    CONTAINERS,
    UNKNOWN,
    attribute,
    behind,
    followed,
    function_of,
    held_by,
    item,
    users,
)
from onecard.static.guards.seen import DRAWS, Seen

_SWITCHES = (
    torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_float32_matmul_precision, torch.is_anomaly_enabled, torch.initial_seed, torch.get_num_threads,
    torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.math_sdp_enabled,
)  # fmt: skip
"""What says how torch is set for the whole process."""


class Calls:
    """Notes what calls look at; ``of_library``: those that come are of a library without torch."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.of_library = seen, False

    def look(self, f: Any, args: list[Any], e: Expr, line: str) -> None:
        """Note what a call looks at that is not the program's own Python, which is followed. Spread arguments are one tuple."""
        if not self.of_library:
            self._files(f, args, e, line)
            self._beside(f, args, e, line)
        if isinstance(f, functools.partial) and self.seen.was_there(f):
            self.seen.whole(f.keywords, f"{text(e.base)}.keywords", line)
        elif _one_of(f, _SWITCHES):
            self.seen.ask(f, f, f"{text(e.base)}()", line)
        if _one_of(f, _LOOKS) and len(args) >= 2 and e.name is None and args[0] is not UNKNOWN:
            self._by_name(f, args[0], args[1], text(e.args[0]), line)
        elif _is_followed(f) or _one_of(f, _NO_LOOK):
            return
        elif isinstance(f, _CACHED):
            self.seen.ask(f, lambda: f.cache_info().misses, f"the cache of {f.__name__}", line)
        elif not self._of_container(f, args, e, line):
            self._inside(f, args, e, line)
            for x, name in zip(args, e.args, strict=True):
                self.seen.whole(x, text(name), line)
                if f is next or not isinstance(x, io.IOBase):
                    self.goes_on(x, text(name), line)
                if _lays_open(f):
                    self.laid_open(x, text(name), line)
                elif any(isinstance(key, operator.attrgetter) for key in args) and isinstance(behind(x), CONTAINERS):
                    for part in behind(x):  # max(them, key=attrgetter("loss"))
                        self.laid_open(part, text(name), line)

    def _beside(self, f: Any, args: list[Any], e: Expr, line: str) -> None:
        """What is asked of files, of a log's level, of another thread, of a generator of random numbers of the program's own."""
        own, name = getattr(f, "__self__", None), getattr(f, "__name__", "")
        given = args if e.name is None else []
        if (path := file_that_is_read(f, name, given)) is not None:
            file = f"the file {os.fspath(path)}"
            self.seen.ask(file, functools.partial(state_of, path), file, line)
        elif (asked := question(f, given)) is not None and (own is None or self.seen.was_there(own)):
            said = f"{text(e.base)}({', '.join(map(repr, given))})"
            self.seen.ask(said if own is None else own, asked, said, line)
        elif isinstance(own, logging.Logger) and name in ("getEffectiveLevel", "isEnabledFor"):
            self.seen.ask(own, own.getEffectiveLevel, f"{text(e.base)}()", line)
        elif isinstance(own, threading.Thread | concurrent.futures.Executor) and name in ("start", "submit", "map"):
            self.seen.never = self.seen.never or (
                f"the step hands work to a thread at {line}, and what that reads is not seen: do it before the step"
            )
        elif (
            isinstance(own, random.Random | numpy.random.Generator)
            and (self.seen.was_there(own) or self.seen.was_there(f))  # a method that is kept
            and own is not random.random.__self__  # type: ignore[attr-defined]  # Python's own is looked at itself
        ):
            self.seen.repeats(DRAWS, text(e.base).rpartition(".")[0], line)
        elif isinstance(f, types.BuiltinMethodType) and self.seen.was_there(own) and not _says_the_same(own, name):
            self.seen.repeats("asks", f"{text(e.base).rpartition('.')[0]}, a {type(own).__name__},", line)

    def _inside(self, f: Any, args: list[Any], e: Expr, line: str) -> None:
        """What a function finds in its own object, in attributes by paths, and by methods that it is given."""
        own = getattr(f, "__self__", None)
        if isinstance(f, types.MethodType) and isinstance(own, CONTAINERS):  # NumPy's, written in Python
            self.seen.whole(own, text(e.base).rpartition(".")[0], line)
        for x, name in zip(args, e.args, strict=True):
            method = getattr(x, "__self__", None) if isinstance(x, types.BuiltinMethodType) else None
            if isinstance(method, CONTAINERS) and x.__name__ not in _WRITES:  # map(rates.__getitem__, names)
                self.seen.whole(method, text(name), line)
            if isinstance(f, operator.attrgetter) and x is not UNKNOWN:
                for path in names_of(f):
                    for place in along(x, path):
                        self.seen.read(place, f"{text(name)}.{'.'.join(path)}", line)
            elif looks_inside(f) and x is not UNKNOWN:
                self.laid_open(x, text(name), line)

    def _files(self, f: Any, args: list[Any], e: Expr, line: str) -> None:
        """What writes to a file: its own methods, a path's, functions that are given it."""
        own, name = getattr(f, "__self__", None), getattr(f, "__name__", "")
        if isinstance(own, io.StringIO | io.BytesIO) and not self.seen.was_there(own):
            return  # the step's own memory
        if isinstance(own, io.IOBase | pathlib.Path) and name in _TO_FILES:
            self.seen.writes(own, text(e.base).rpartition(".")[0], line)
        elif _one_of(f, _SAVERS):
            self.seen.writes(f, f"a file, by {text(e.base)}", line)
        elif name in _GIVEN_FILES:
            for x, of in zip(args, e.args, strict=True):
                if isinstance(x, io.IOBase):
                    self.seen.writes(x, text(of), line)

    def laid_open(self, x: Any, name: str, line: str) -> None:
        """All attributes of an object may be looked at."""
        if isinstance(x, types.ModuleType) and not users(x.__name__):
            return  # torch's own, which grows as its parts are imported
        held = held_by(x)
        if held is not None and self.seen.was_there(x):
            self.seen.old(held)
            self.seen.whole(held, name, line)

    def _by_name(self, f: Any, x: Any, name: Any, words: str, line: str) -> None:
        """``getattr`` and its like."""
        if not isinstance(name, str):  # a name that is computed
            self.laid_open(x, words, line)
            return
        for place in attribute(x, name)[1]:
            if _one_of(f, (setattr, delattr, object.__setattr__)):
                self.seen.stored(place)
            else:
                self.seen.read(place, f"{words}.{name}", line)

    def _of_container(self, f: Any, args: list[Any], e: Expr, line: str) -> bool:
        """A method of a list, a dict and their like."""
        of_c = isinstance(f, types.BuiltinMethodType | types.MethodWrapperType)
        own = behind(getattr(f, "__self__", None)) if of_c else None
        name = text(e.base).rpartition(".")[0] or text(e.base)
        if isinstance(own, contextvars.ContextVar):
            if f.__name__ == "get":
                self.seen.ask(own, functools.partial(own.get, ABSENT), f"{name}.get()", line)
            else:  # the step sets it itself
                self.seen.settled(own)
            return True
        if isinstance(own, random.Random | numpy.random.RandomState):
            return True  # a warning says so (``randomness.py``)
        if isinstance(own, collections.abc.Iterator):
            if f.__name__ in _ADVANCES:
                self.goes_on(own, name, line)
            return True
        if not isinstance(own, CONTAINERS):
            return False
        by_key = isinstance(own, dict) and args and e.name is None and args[0] is not UNKNOWN
        if by_key and f.__name__ in ("get", "setdefault", "__getitem__", "__contains__"):
            for place in item(own, args[0])[1]:
                self.seen.read(place, f"{name}[{args[0]!r}]", line)
            return True
        if f.__name__ not in _WRITES:
            self.seen.whole(own, name, line)
        elif not self.of_library:
            self.seen.grows(own, name, line)
        for x, of in zip(args, e.args, strict=True):
            if f.__name__ not in ("append", "add", "insert"):
                self.seen.whole(x, text(of), line)
        return True

    def goes_on(self, x: Any, name: str, line: str) -> None:
        """What gives another value each time it is asked, and was there before the step."""
        if isinstance(x, collections.abc.Iterator) and self.seen.was_there(x) and not self.seen.never:
            self.seen.never = (
                f"the step takes the next of {name} at {line}: take it before the step and pass it as an argument"
            )


def _says_the_same(x: Any, name: str) -> bool:
    """Whether what a method of C answers is known to be told by other means, or to be no more than the object's value."""
    held = (
        (base, vars(base).get(name)) for base in type(x).__mro__
    )  # a class of Python's own may call this one by super
    base = next((base for base, f in held if f is not None and not isinstance(f, types.FunctionType)), object)
    return str(base.__module__).partition(".")[0] in _TOLD


def _is_followed(f: Any) -> bool:
    """Whether what a call runs is the program's own Python, where each look is seen."""
    if f is UNKNOWN:
        return False
    own = function_of(f)
    if own is not None:
        return followed(own.__globals__.get("__name__", ""))
    if isinstance(f, type):
        return bool(f.__flags__ & 1 << 9) and followed(f.__module__)
    return isinstance(f, nn.Module) or (not isinstance(f, types.BuiltinFunctionType) and followed(type(f).__module__))


def _lays_open(f: Any) -> bool:
    """Whether a function goes through all attributes of what it is given."""
    return _one_of(f, _OPEN) or isinstance(f, operator.attrgetter) or _one_of(f, (copy.copy, copy.deepcopy))


def _one_of(f: Any, functions: tuple[Any, ...]) -> bool:
    return any(f is g for g in functions)


_TOLD = frozenset(
    (
        "builtins",
        "torch",
        "onecard",
        "numpy",
        "re",
        "io",
        "_io",
        "_thread",
        "threading",
        "datetime",
        "decimal",
        "functools",
    )
    + (
        "itertools",
        "operator",
        "collections",
        "_contextvars",
        "contextvars",
        "weakref",
        "_weakref",
        "types",
        "time",
        "uuid",
    )
    + (
        "random",
        "_random",
        "array",
        "mmap",
        "_ctypes",
        "ctypes",
        "struct",
        "_struct",
        "hashlib",
        "_hashlib",
        "_operator",
    )
)
"""Modules of C whose objects are values, or are followed in another way."""
_LOOKS = (getattr, hasattr, setattr, delattr, object.__getattribute__, object.__setattr__)
_CACHED = type(functools.lru_cache(len))
_ADVANCES = ("__next__", "send", "throw", "read", "readline", "readlines", "readinto")
_NO_LOOK = (isinstance, issubclass, type, id, callable, print, super)
_OPEN = (vars, dataclasses.asdict, dataclasses.astuple, dataclasses.replace, dataclasses.fields)
_TO_FILES = ("write", "writelines", "truncate", "write_text", "write_bytes")
_SAVERS = (torch.save, numpy.save, numpy.savez, numpy.savetxt)
_GIVEN_FILES = ("dump", "writer", "writerow", "writerows")
_WRITES = {"append", "appendleft", "add", "extend", "extendleft", "update", "insert", "clear", "discard"}
_WRITES |= {"__iadd__", "__ior__", "__setitem__", "__delitem__"}
