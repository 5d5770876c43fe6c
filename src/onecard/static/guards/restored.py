"""What a step that runs once more has changed in the program's Python, of what it reads: a counter, a list that it appends to."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy

from onecard.static.guards.guard import Guard
from onecard.static.guards.lookup import ABSENT, now_at
from onecard.static.guards.unchanged import copied, is_plain

_FAULTS = (AttributeError, TypeError, ValueError, LookupError)  # of what cannot be written to


def put_back(guards: Iterable[Guard]) -> None:
    """Numbers, texts and containers are as they were when the step has read them first.

    Example:
        >>> from onecard.static.guards.lookup import Place
        >>> log = [1, 2, 3]
        >>> put_back([Guard(Place("whole", log, None, log), (1, 2), "log", "train.py:3")])
        >>> log
        [1, 2]
    """
    for guard in guards:
        kind, holder, key, _ = guard.place
        if kind == "whole":
            with suppress(*_FAULTS):
                if not _holds(holder, guard.must):
                    _refill(holder, guard.must)
        if kind not in ("entry", "slot", "cell") or not (guard.must is ABSENT or is_plain(guard.must)):
            continue
        now = now_at(guard.place)
        if (
            now is guard.must
            or (type(now) is type(guard.must) and now == guard.must)
            or not (now is ABSENT or is_plain(now))
        ):
            continue
        with suppress(*_FAULTS):
            _set(kind, holder, key, guard.must)


def _holds(x: Any, held: Any) -> bool:
    """Whether a container has the same objects as then, in their order: tensors are not asked whether they are equal."""
    now = copied(x)
    if not isinstance(held, dict | tuple):
        return bool(now == held)
    parts = [(*seen, *seen.values()) if isinstance(seen, dict) else seen for seen in (now, held)]
    return len(now) == len(held) and all(map(operator.is_, *parts))


def _refill(x: Any, held: Any) -> None:
    if isinstance(x, numpy.ndarray):
        shape, dtype, data = held
        if data is not None and (x.shape, x.dtype) == (shape, dtype):
            x[...] = numpy.frombuffer(data, dtype).reshape(shape)
    elif isinstance(x, dict | set):
        x.clear()
        x.update(held)
    elif isinstance(x, collections.deque):
        x.clear()
        x.extend(held)
    elif isinstance(x, list | bytearray):
        x[:] = held


def _set(kind: str, holder: Any, key: Any, value: Any) -> None:
    if kind == "entry":
        if value is ABSENT:
            del holder[key]
        else:
            holder[key] = value
    elif kind == "slot":
        key.__delete__(holder) if value is ABSENT else key.__set__(holder, value)
    elif value is not ABSENT:
        holder.cell_contents = value
