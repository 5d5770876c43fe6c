"""Dicts and lists among a step's arguments: a recording has its own, so that what the step puts into them is not the caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from onecard._torch.names import tree_unflatten

_OUTSIDE = ", which it is given, in Python, which a replay does not repeat: return it, and put it there outside"
_Content = tuple[list[Any], list[Any]]


class HandedOver:
    """The arguments that a run is given, put together of leaves.

    Attributes:
        found: positional ones and keywords.
    """

    def __init__(self, given: Sequence[Any], tree: Any) -> None:
        self.found: tuple[Any, Any] = tree_unflatten([*given], tree)
        args, kwargs = self.found
        named = [
            *((f"argument {i}", x) for i, x in enumerate(args)),
            *((f"argument {key!r}", x) for key, x in kwargs.items()),
        ]
        self._were = [(x, _content(x), name) for begin, value in named for x, name in _containers(value, begin)]

    def filled(self) -> str:
        """What the run has put into a container of the caller's, in words; "" for nothing. What it only takes out is let be."""
        for x, (keys, values), name in self._were:
            now = _content(x)
            if isinstance(x, dict):
                had = dict(zip(keys, values, strict=True))
                put = next(
                    (key for key, value in zip(*now, strict=True) if key not in had or had[key] is not value), None
                )
                if put is not None:
                    return f"the step sets {name}[{put!r}]{_OUTSIDE}"
            elif not _is_part(now[1], values):
                return f"the step changes the {type(x).__name__} {name}{_OUTSIDE}"
        return ""


def _content(x: Any) -> _Content:
    return ([*x], [*x.values()]) if isinstance(x, dict) else ([], [*x])


def _is_part(now: list[Any], before: list[Any]) -> bool:
    """Whether a list is another one without some of its members."""
    rest = iter(before)
    return all(any(x is y for y in rest) for x in now)


def _containers(x: Any, name: str) -> Iterator[tuple[Any, str]]:
    if isinstance(x, dict | list | deque):
        yield x, name
    if isinstance(x, dict | list | deque | tuple):
        keys, values = _content(x)
        for key, value in zip(keys or range(len(values)), values, strict=True):
            yield from _containers(value, f"{name}[{key!r}]")
