"""When a value of Python is what it was: by value, of those that are nothing but a value; the same object, of all others."""

from __future__ import annotations

import collections
import enum
import mmap
import types
from typing import Any

import numpy
import torch

from onecard.static.guards.before import STILL
from onecard.static.guards.lookup import BYTES, CONTAINERS

_VALUES = (
    *STILL, bytes, complex, enum.Enum, slice, range, numpy.generic, torch.dtype, torch.device, types.BuiltinFunctionType,
)  # fmt: skip
_SMALL = 64  # entries of a container that is compared by them where another one stands in its place


def is_plain(x: Any) -> bool:
    """Whether a value is nothing but a value."""
    if isinstance(x, tuple | frozenset):
        return all(map(is_plain, x))
    return isinstance(x, _VALUES)


def copied(x: Any) -> Any:
    """What a container holds now."""
    if isinstance(x, numpy.ndarray):
        return x.shape, x.dtype, tuple(x.ravel().tolist()) if x.dtype.hasobject else x.tobytes()
    if isinstance(x, mmap.mmap):
        return x[:]
    if isinstance(x, collections.OrderedDict):  # an order of its own
        return {key: dict.__getitem__(x, key) for key in collections.OrderedDict.__iter__(x)}
    if isinstance(x, dict):
        return dict(dict.items(x))
    if isinstance(x, set):
        return frozenset(x)
    return bytes(x) if isinstance(x, BYTES) else tuple(x)


def is_still(x: Any, held: Any) -> bool:
    """Whether a container holds what it held (``copied``)."""
    if isinstance(x, numpy.ndarray) and x.dtype.hasobject:
        shape, dtype, values = copied(x)
        same = (shape, dtype) == held[:2] and len(values) == len(held[2])
        return same and not any(a is not b and differs(a, b) for a, b in zip(values, held[2], strict=True))
    if isinstance(x, BYTES):
        return bool(copied(x) == held)
    if len(x) != len(held):
        return False
    if isinstance(x, dict):
        ordered = isinstance(x, collections.OrderedDict)
        now = copied(x) if ordered else x
        pairs = zip(dict.items(now), held.items(), strict=True)  # in their order, which a loop goes by
        return all(_is_same_key(a, b) and not differs(v, w) for (a, v), (b, w) in pairs)
    if isinstance(x, set):
        return bool(x == held)
    return not any(a is not b and differs(a, b) for a, b in zip(x, held, strict=True))


def _is_same_key(a: Any, b: Any) -> bool:
    """Whether a dict finds the same by both; a tensor, which compares elements, is a key by itself."""
    return a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b))


class Small:
    """A small container of plain values: another one with the same is as good."""

    def __init__(self, container: Any) -> None:
        self.container, self.held = container, copied(container)

    def __repr__(self) -> str:
        return repr(self.container)


def kept(x: Any) -> Any:
    """What is kept of a value to compare others with."""
    small = type(x) in (list, dict, set, collections.deque) and len(x) <= _SMALL
    return Small(x) if small and all(map(is_plain, x.values() if type(x) is dict else x)) else x


def differs(now: Any, before: Any) -> bool:
    """Whether a value is no longer what it was."""
    if isinstance(before, Small):
        return now is not before.container and (
            type(now) is not type(before.container) or not is_still(now, before.held)
        )
    if now is before:
        return False
    if type(now) is not type(before):
        return True
    if isinstance(before, tuple):
        return len(now) != len(before) or any(map(differs, now, before))
    return not is_plain(before) or bool(now != before)


def shown(x: Any) -> str:
    """A value for a message, not too long."""
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)}"
    if not is_plain(x) and not isinstance(x, (*CONTAINERS, Small)):
        return f"a {type(x).__name__}"
    found = repr(x)
    return found if len(found) <= 60 else found[:57] + "..."
