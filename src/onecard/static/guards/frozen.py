"""What ``gc.freeze`` has put where Python's collector lists nothing: a program's objects all the same."""

from __future__ import annotations

import gc
import sys
from itertools import compress
from types import FrameType
from typing import Any


class _Mark:
    """Made after something was frozen: where it is listed, nothing was frozen since."""


class _Settled:
    """Of the process, as ``gc`` is: what was frozen before ``mark`` was made holds nothing of a program."""

    mark: _Mark | None = None


def settle() -> None:
    """Say that what is frozen so far are modules without a program: they need not be looked through."""
    _Settled.mark = _Mark()


def is_any(listed: list[Any]) -> bool:
    """Whether a program may have frozen objects, by what ``gc.get_objects()`` lists."""
    mark = _Settled.mark
    return gc.get_freeze_count() > 0 and (mark is None or not any(x is mark for x in listed))


def objects(listed: list[Any]) -> list[Any]:
    """What is frozen, beside what is listed: all that modules, running functions and listed objects lead to.

    The collector names frozen objects only once they are thawed, all of them, which would be a program's decision undone. A
    second of work for some 300,000 objects; what only C code leads to is not found.
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
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            there.append([*frame.f_locals.values()])
            frame = frame.f_back
    return there
