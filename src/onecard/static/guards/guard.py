"""``Guard``: one thing that a replay relies on. What is read, what it must be, and what is said where it is not."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from onecard.static.guards.lookup import ABSENT, Place, now_at
from onecard.static.guards.unchanged import differs, is_still, shown

LOOKED_UP = ("entry", "class", "slot", "cell")
"""Kinds of places that have a value for each name; the others are "whole", "answer" and "code"."""
OF_CODE = ("__code__", "__defaults__", "__kwdefaults__")


class Guard(NamedTuple):
    """One thing that was looked at, in the program's Python.

    Attributes:
        place: what is read.
        must: what was there.
        name: what it is called in the program; ``line``: where.
        library: whether one without torch looked it up, whose own counts are nothing to the step.
    """

    place: Place
    must: Any
    name: str
    line: str
    library: bool = False

    def difference(self) -> str:
        """What is no longer as it was, in words; "" if all is."""
        kind, holder, *_ = self.place
        if kind == "whole":
            said = "" if is_still(holder, self.must) else f"{_other_entries(holder, self.must)} ({self.line})"
            return said and f"{self.name}, which the step reads, {said}"
        now = now_at(self.place)
        if kind == "code":
            other = f"{self.name}, which the step calls, has another body or other defaults"
            return "" if now is self.must else other
        return (
            f"{self.name}, which the step reads, {_change(self.must, now, self.line)}"
            if differs(now, self.must)
            else ""
        )


def _change(before: Any, now: Any, line: str) -> str:
    """What has become of a value."""
    if now is ABSENT:
        return f"was {shown(before)} and is gone ({line})"
    if before is ABSENT:
        return f"was not there and is {shown(now)} ({line})"
    if isinstance(before, Tensor):
        return f"is another tensor ({line}); pass it as an argument"
    if shown(before) == shown(now):
        return f"is another object ({line})"
    advice = "; pass it as an argument (a float may change)" if isinstance(before, int | float) else ""
    return f"was {shown(before)} and is {shown(now)} ({line}){advice}"


def _other_entries(x: Any, held: Any) -> str:
    """What has become of a container."""
    if isinstance(held, tuple | dict | frozenset) and not hasattr(x, "dtype") and len(x) != len(held):
        return f"had {len(held)} entries and has {len(x)}"
    return "holds other entries"
