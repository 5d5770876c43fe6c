"""Looking things up as Python would, without running any code of the program's: in dicts, slots, classes, lists, cells."""

from __future__ import annotations

import _thread
import array
import collections
import ctypes
import functools
import gc
import mmap
import os
import sys
import threading
import types
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn


class _Nothing:
    """A value that stands for none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


ABSENT = _Nothing("nothing")  # looked for, and not there
UNKNOWN = _Nothing("...")  # cannot be told without running the program's code

BYTES = (numpy.ndarray, bytearray, array.array, memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.Union)
CONTAINERS = (list, dict, set, collections.deque, *BYTES)


_Environment = type(os.environ)


class Place(NamedTuple):
    """Where a value was looked for.

    ``kind``: "entry" of a dict, list or deque, "class", "slot" (``key`` is its descriptor), "cell"; "code" of a function (``key``
    is that attribute), "whole": all that a container holds, "answer": what ``holder`` gives when it is called. ``owner``: the
    object that has it, which is ``holder`` but for the dict of an object's attributes.
    """

    kind: str
    holder: Any
    key: Any
    owner: Any


@functools.lru_cache(maxsize=8192)
def users(module: str) -> bool:
    """Whether a module of Python is the user's, or a library's that is built on torch: it runs whoever calls it."""
    top = module.partition(".")[0]
    if top in ("torch", "onecard", "numpy"):
        return module == "torch.optim.lr_scheduler"
    if top == "__main__" or top not in sys.stdlib_module_names:
        return not installed(top) or top in _built_on_torch(len(sys.modules))
    return False


def installed(module: str) -> bool:
    """Whether a module of Python is of an installed library."""
    return "site-packages" in (vars(sys.modules.get(module.partition(".")[0]) or sys).get("__file__") or "")


@functools.lru_cache(maxsize=1)
def _built_on_torch(count: int) -> frozenset[str]:
    """The libraries of which some module holds torch, among so many modules."""
    modules = [(name, m) for name, m in list(sys.modules.items()) if isinstance(m, types.ModuleType)]
    return frozenset(name.partition(".")[0] for name, m in modules if vars(m).get("torch") is torch)


@functools.lru_cache(maxsize=8192)
def helps(module: str) -> bool:
    """Whether a module is another library's, whose functions are the user's where the user calls them."""
    top = module.partition(".")[0]
    if top in ("torch", "onecard", "numpy"):
        return False
    return top not in sys.stdlib_module_names or module in _FOLLOWED


_FOLLOWED = (
    "os",
    "collections",
    "collections.abc",
    "_collections_abc",
    "configparser",
    "argparse",
    "functools",
    "types",
    "queue",
    "weakref",
)
"""Of the standard library's modules in Python, those that hold settings for others."""


def in_bases(kind: type, name: str) -> tuple[tuple[Place, ...], Any]:
    """Where an attribute is looked for in a class and its bases, and what is there, as it stands in the class."""
    places = []
    for base in kind.__mro__:
        held = vars(base)
        if name in held:
            if base.__flags__ & _MADE_IN_PYTHON:
                places.append(Place("class", base, name, base))
            return tuple(places), held[name]
        if users(base.__module__ if isinstance(base.__module__, str) else ""):
            places.append(Place("class", base, name, base))
    return tuple(places), ABSENT


_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_STORED = (types.MemberDescriptorType, types.GetSetDescriptorType)


@functools.lru_cache(maxsize=8192)
def _dict_of(kind: Any) -> Any:
    """What gives the attributes of an object of a class, whatever the class says of ``__dict__``; None if they have none."""
    for base in kind.__mro__:
        found = vars(base).get("__dict__")
        if isinstance(found, _STORED):
            return found.__get__
    return None


def held_by(x: Any) -> Any:
    """The dict of an object's own attributes; None if it has none."""
    if isinstance(x, threading.local):
        return _thread._local.__getattribute__(x, "__dict__")  # this thread's
    kind: Any = type(x)
    getter = _dict_of(kind)
    return None if getter is None else getter(x)


def attribute(x: Any, name: str) -> tuple[Any, tuple[Place, ...]]:
    """The value of an attribute, or ABSENT or UNKNOWN, and where it was looked for."""
    if isinstance(x, super):
        return _above(x, name)
    if isinstance(x, type):
        places, raw = in_bases(x, name)
        if name in ("__name__", "__qualname__"):
            return type.__getattribute__(x, name), ()
        if raw is ABSENT and hasattr(type, name):
            return UNKNOWN, ()
        if raw is ABSENT and type(x) is not type:
            beyond, raw = in_bases(type(x), name)
            return _plainly(raw, x, type(x)), (*places, *beyond)
        return _plainly(raw, None, x), places
    places, raw = in_bases(type(x), name)
    if isinstance(x, Tensor) and raw is not ABSENT:
        return UNKNOWN, ()
    if name == "__dict__" and isinstance(raw, _STORED):
        return raw.__get__(x), ()
    if isinstance(raw, _STORED):
        try:
            return raw.__get__(x, type(x)), (*places, Place("slot", x, raw, x))
        except AttributeError:
            return ABSENT, (*places, Place("slot", x, raw, x))
    if raw is not ABSENT and hasattr(type(raw), "__set__"):  # a property, which is a function of the program's
        return UNKNOWN, places
    held = held_by(x)
    if type(held) is dict:
        own = Place("entry", held, name, x)
        if name in held:
            return held[name], (own,)
        places = (own, *places)
    if raw is ABSENT and isinstance(x, nn.Module) and type(held) is dict:
        for kind in ("_parameters", "_buffers", "_modules"):
            own_kind = (
                getattr(held.get(kind), "plain", held.get(kind)) or {}
            )  # asking by name may gather it (``own_parameters``)
            if dict.__contains__(own_kind, name):
                return dict.__getitem__(own_kind, name), (*places, Place("entry", own_kind, name, x))
    if raw is ABSENT and isinstance(x, dict) and in_bases(type(x), "__getattr__")[1] is dict.__getitem__:
        found, inner = item(x, name)
        return found, (*places, *inner)
    return _plainly(raw, x, type(x)), places


def _above(x: Any, name: str) -> tuple[Any, tuple[Place, ...]]:
    """An attribute of what ``super()`` gives."""
    this, of, kind = x.__thisclass__, x.__self__, x.__self_class__
    bases = kind.__mro__
    for base in bases[bases.index(this) + 1 :]:
        if name in vars(base):
            place = (Place("class", base, name, base),) if base.__flags__ & _MADE_IN_PYTHON else ()
            return _plainly(vars(base)[name], of, kind), place
    return UNKNOWN, ()


def _plainly(raw: Any, x: Any, kind: type) -> Any:
    """What stands in a class, as an attribute: methods are bound; UNKNOWN of what code of the program's decides."""
    if isinstance(raw, types.FunctionType):
        return raw if x is None else types.MethodType(raw, x)
    if isinstance(raw, staticmethod | classmethod | types.MethodDescriptorType | types.WrapperDescriptorType):
        return raw.__get__(x, kind)
    if type(raw).__name__ == "cython_function_or_method":
        return raw if x is None else raw.__get__(x, kind)
    if isinstance(raw, property) or hasattr(type(raw), "__get__"):
        return UNKNOWN
    return raw


def behind(x: Any) -> Any:
    """The dict of which a view or a read-only proxy shows the entries; any other value itself."""
    if isinstance(x, SHOW):
        return next((held for held in gc.get_referents(x) if isinstance(held, dict)), x)
    return x


SHOW: tuple[Any, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))


def item(x: Any, key: Any) -> tuple[Any, tuple[Place, ...]]:
    """The value of ``x[key]``, or ABSENT or UNKNOWN, and where it was looked for."""
    x = behind(x)
    kind = type(x)
    if isinstance(x, _Environment):
        held, key = x._data, x.encodekey(key)  # type: ignore[attr-defined]
        return dict.get(held, key, ABSENT), (Place("entry", held, key, x),)
    if isinstance(x, dict) and kind.__getitem__ is dict.__getitem__:
        return dict.get(x, key, ABSENT), (Place("entry", x, key, x),)
    if isinstance(x, tuple) and kind.__getitem__ is tuple.__getitem__ and isinstance(key, int):
        return tuple.__getitem__(x, key) if -len(x) <= key < len(x) else ABSENT, ()
    if isinstance(x, list | collections.deque) and isinstance(key, int) and kind.__getitem__ in _ITEMS:
        there = -len(x) <= key < len(x)
        return kind.__getitem__(x, key) if there else ABSENT, (Place("entry", x, key, x),)
    return UNKNOWN, ()


_ITEMS = (list.__getitem__, collections.deque.__getitem__)


def now_at(place: Place) -> Any:
    """What is there now; ABSENT if nothing is."""
    kind, holder, key, _ = place
    try:
        if kind == "entry":
            return dict.get(holder, key, ABSENT) if isinstance(holder, dict) else holder[key]
        if kind == "class":
            return vars(holder).get(key, ABSENT)
        if kind == "slot":
            return key.__get__(holder, type(holder))
        if kind == "code":
            return getattr(holder, key)
        if kind == "answer":
            return holder()
        return holder if kind == "whole" else holder.cell_contents
    except (AttributeError, IndexError, KeyError, ValueError):
        return ABSENT


def function_of(f: Any) -> Any:
    """The function that is called where something is: of a method, of a partial, behind a decorator; None if there is none."""
    while True:
        if isinstance(f, types.MethodType | staticmethod | classmethod):
            f = f.__func__
        elif isinstance(f, functools.partial):
            f = f.func
        elif isinstance(f, property):
            f = f.fget
        elif isinstance(f, types.FunctionType):
            inner = f.__dict__.get("__wrapped__")
            if not isinstance(inner, types.FunctionType):
                return f
            f = inner
        else:
            return None


def followed(module: Any) -> bool:
    """Whether functions of a module are followed, where the program calls them."""
    return users(str(module)) or helps(str(module))
