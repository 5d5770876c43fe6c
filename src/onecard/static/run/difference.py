"""What of a step is not as it was recorded, in words: which call, which argument, both values, and the user's line."""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import OpOverload
from onecard.static.capture.script import Ref, ScriptEntry, StepScript


@dataclass
class Difference:
    """The first difference between a step and its recording.

    ``kind``: "argument" of a call (``now``: its name or number, the value, what it was), "other" call, "more", "fewer",
    "sends", "result", "returns", "leaves", "gradient". ``entry``: what was recorded there.
    """

    kind: str
    now: Any
    entry: Any
    line: str = field(default="")

    def __str__(self) -> str:
        return _WORDS[self.kind](self)


def same(value: Any, other: Any) -> bool:
    """Whether two plain values are equal; NaN equals NaN, an int is no bool, objects are one or not.

    Example:
        >>> same(1.0, 1.0), same(math.nan, math.nan), same(True, 1), same([1, 2], (1, 2))
        (True, True, False, True)
    """
    if value is other:
        return True
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return value == other or (math.isnan(value) and math.isnan(other))
    if isinstance(value, Tensor) or isinstance(other, Tensor) or isinstance(value, bool) is not isinstance(other, bool):
        return False
    try:
        return bool(value == other)
    except (RuntimeError, ValueError, TypeError):  # what its class says of equality is no answer
        return False


def between(was: StepScript, now: StepScript) -> str:
    """What the first difference of two recordings of one step is, in words; "" if they are one."""
    for entry, other in zip(was.entries, now.entries, strict=False):
        if entry.target is not other.target:
            return str(Difference("other", other.target, entry, other.line))
        for name, value, expected in _arguments(entry, other):
            if not same(value, expected):
                known = (name, _known(now, value), _known(was, expected))
                return str(Difference("argument", known, entry, other.line))
        if not _same_values(entry.constant, other.constant):
            values = "values", _known(now, other.constant), _known(was, entry.constant)
            return str(Difference("argument", values, entry, other.line))
    if len(was.entries) != len(now.entries):
        more = len(now.entries) > len(was.entries)
        entry = (now if more else was).entries[min(len(was.entries), len(now.entries))]
        return str(Difference("more" if more else "fewer", entry.target, entry, entry.line))
    if was.tree != now.tree:
        return str(Difference("returns", None, None))
    for i, (value, expected) in enumerate(zip(now.results, was.results, strict=True)):
        if not same(value, expected):
            return str(Difference("result", (i, value, expected), None))
    left = next((e for e, other in zip_longest(now.effects, was.effects) if e is not None and e != other), None)
    return str(Difference("leaves", left, None)) if left is not None else ""


def _arguments(entry: ScriptEntry, other: ScriptEntry) -> Iterator[tuple[Any, Any, Any]]:
    """Those of a call, by number or name: as they are, and as they were."""
    yield from ((i, *both) for i, both in enumerate(zip_longest(other.args, entry.args)))
    yield from ((key, other.kwargs.get(key), entry.kwargs.get(key)) for key in {**entry.kwargs, **other.kwargs})


def _same_values(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.dtype is y.dtype and x.shape == y.shape and bool(torch.equal(x, y))


def _known(script: StepScript, value: Any) -> Any:
    return _Named(script.name_of(value)) if isinstance(value, Ref) else value


class _Named(str):
    """A value that is said by its name."""

    def __repr__(self) -> str:
        return str(self)


def _call(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def _at(line: str) -> str:
    """A line of the user's, with what stands there."""
    path, _, number = line.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"{line} (`{text}`)" if text else line or "an unknown line"


def _argument(found: Difference) -> str:
    name, value, was = found.now
    target = found.entry.target
    if isinstance(name, int) and isinstance(target, OpOverload):
        name = target._schema.arguments[name].name
    elif isinstance(name, int):
        name = f"argument {name}"
    at = f"{_call(target)} at {_at(found.line)}"
    if isinstance(value, Tensor):
        return f"{at}: {name} is another tensor than was recorded ({was}); give it to the step as an argument"
    return f"{at}: {name} was {was!r} and is {value!r}, read in Python where no guard sees it; {_PASS}"


def _other(found: Difference) -> str:
    return (
        f"{_call(found.now)} is called at {_at(found.line)} where {_call(found.entry.target)} of {_at(found.entry.line)} was "
        f"recorded: Python takes another way (an if, a loop, another object) that no guard sees; {_PASS}"
    )


def _result(found: Difference) -> str:
    i, value, was = found.now
    now = "another tensor" if isinstance(value, Tensor) else f"{value!r}"
    return f"result {i} was {was!r} and is {now}; {_PASS}"


_PASS = "what changes from call to call should be an argument (a float or a tensor)"
_WORDS = {
    "argument": _argument,
    "other": _other,
    "more": lambda d: f"{_call(d.now)} at {_at(d.line)} is called after all that was recorded; {_PASS}",
    "fewer": lambda d: (
        f"{_call(d.entry.target)} of {_at(d.entry.line)} was recorded and is not called any more; {_PASS}"
    ),
    "sends": lambda d: f"a message {d.now} at {_at(d.line)} is of a kind that no recording holds",
    "result": _result,
    "returns": lambda d: f"it returns values in another form than was recorded; {_PASS}",
    "leaves": lambda d: f"its {d.now.kind} {d.now.where} comes from elsewhere than was recorded; {_PASS}",
    "gradient": lambda d: f"it changes the gradient of {d.now}, which was not recorded; {_PASS}",
}
