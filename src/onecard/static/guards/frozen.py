"""What ``gc.freeze`` has put where Python's collector lists nothing: a program's objects all the same."""

from __future__ import annotations

import gc
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from inspect import CO_OPTIMIZED
from itertools import compress
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

Kinds = Callable[[Iterable[type]], set[type]]
"""Of some types those that are asked for."""


def kinds_of(*bases: type) -> Kinds:
    """Classes that are derived from any of these.

    Example:
        >>> sorted(kind.__name__ for kind in kinds_of(int, dict)([bool, float, dict]))
        ['bool', 'dict']
    """
    return lambda kinds: {kind for kind in kinds if issubclass(kind, bases)}


class _Mark:
    """Made after something was frozen: where it is listed, nothing was frozen since."""

    def is_listed(self, listed: list[Any]) -> bool:
        """Among what ``gc.get_objects()`` lists."""
        return operator.countOf(map(id, listed), id(self)) > 0


class _Settled:
    """Of the process, as ``gc`` is: what was frozen before ``mark`` was made holds nothing of a program but what is known.

    Attributes:
        known: what a walk has found, by who asks; without keeping it alive, where that can be.
    """

    mark: _Mark | None = None
    known: dict[Kinds, list[Callable[[], Any]]] | None = None


def settle() -> None:
    """Say that what is frozen so far are modules without a program: they need not be looked through."""
    _Settled.mark, _Settled.known = _Mark(), None


def is_any(listed: list[Any]) -> bool:
    """Whether a program may have frozen objects, by what ``gc.get_objects()`` lists."""
    if _settled(listed):
        return _Settled.known is not None
    return gc.get_freeze_count() > 0


def _settled(listed: list[Any]) -> bool:
    # Asked before the count, for which the collector goes through all that is frozen.
    return _Settled.mark is not None and _Settled.mark.is_listed(listed)


def those(listed: list[Any], wanted: Sequence[Kinds]) -> list[list[Any]]:
    """For each question what is frozen of the types that it wants.

    Looked for once: until something else is frozen, there is nothing new among it.

    Args:
        listed: by ``gc.get_objects()``.
        wanted: the same functions at each call, as what is found is kept by them.
    """
    if not _settled(listed):
        if not gc.get_freeze_count():
            return [[] for _ in wanted]
        _Settled.mark, _Settled.known = _Mark(), {}
    known = _Settled.known
    if known is None:
        return [[] for _ in wanted]
    if not {*wanted} <= {*known}:
        every = objects(listed)
        for wants in wanted:
            known[wants] = [_held(x) for x in of_kinds(every, wants)]
    return [[x for x in (find() for find in known[wants]) if x is not None] for wants in wanted]


def _held(x: Any) -> Callable[[], Any]:
    if isinstance(x, Tensor):
        return TensorWeakRef(x)
    # What has no room for a weak reference (an iterator of a list, a class with slots) was frozen to stay: it is kept.
    return weakref.ref(x) if type(x).__weakrefoffset__ else lambda: x


def of_kinds(objects: list[Any], wanted: Kinds) -> list[Any]:
    """Those of the types that are wanted."""
    return of_types(objects, wanted({*map(type, objects)}))


def of_types(objects: list[Any], kinds: set[type]) -> list[Any]:
    """Those of these types, and of none that is derived from them."""
    return [*compress(objects, map(kinds.__contains__, map(type, objects)))]


def objects(listed: list[Any]) -> list[Any]:
    """What is frozen, beside what is listed: all that modules, running functions and listed objects lead to.

    The collector names frozen objects only once they are thawed, all of them, which would be a program's decision undone. A
    second of work for some 300,000 objects, which is why ``those`` remembers; what only C code leads to is not found.
    """
    seen, found = {*map(id, listed)}, []
    todo: list[Any] = [*listed, sys.modules, *_locals()]
    while todo:
        held = gc.get_referents(*todo)
        todo = []
        for x in compress(held, map(gc.is_tracked, held)):
            if id(x) not in seen:
                seen.add(id(x))
                todo.append(x)
        found += todo
    return found


def _locals() -> list[Any]:
    """What all threads' functions have in variables now: the collector does not see into a frame that runs."""
    there: list[Any] = []
    for thread, top in sys._current_frames().items():
        # Up to Python 3.12 a look makes a copy that stays with the frame, and keeps what the function deletes; a debugger that
        # waits within a frame writes its copy back, so that one is let be.
        mine = thread == threading.get_ident() and sys.gettrace() is None
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals is not globals():  # these functions' own lists would hold themselves
                held = frame.f_locals
                there.append([*held.values()])
                if mine and type(held) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
                    held.clear()
            frame = frame.f_back
    del top  # this one: it would keep all that leads here until the next collection
    return there
