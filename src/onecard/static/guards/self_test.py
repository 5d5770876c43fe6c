"""Whether this Python tells what a program looks up: its instructions and the order of a trace change with each version.

A few lookups of each kind are run once in a process, and looked for among what was noted. Where one is not found, a recording
would believe a value for ever; so there are none.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from onecard.errors import RecordingError
from onecard.static.guards.ran import Ran

_PROGRAM = """
class Base:
    of_base = 1

class Cell(Base):
    of_class = 1
    __match_args__ = ("matched",)
    def __init__(self):
        self.by, self.inner, self.compared, self.matched, self.named = 1, [1], 1, 1, 1
    def method(self):
        return super().of_base + self.of_class
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass

SCALE, CELL, ITEMS, MORE, FLAGS = 1, Cell(), {"key": 1, "counted": 1}, {"named": 1}, [Cell()]

def made():
    captured = Cell()
    return lambda: captured.by

def helper(*args, named):
    return named

CAPTURED = made()

def step():
    one, other = CELL.by, CELL.inner[0]
    total = SCALE * one + other + ITEMS["key"] + CAPTURED()
    total += CELL.method() + sum([flag.by for flag in FLAGS]) + helper(*(), **MORE)
    ITEMS["counted"] += 1
    with CELL as entered:
        total += entered.compared if CELL.compared < 2 else 0
    match CELL:
        case Cell(matched, named=named):
            total += matched + named
    return total
"""
WANTED = frozenset(
    (
        "SCALE",
        "CELL",
        "CELL.by",
        "CELL.inner",
        "CELL.inner[0]",
        "ITEMS['key']",
        "ITEMS['counted']",
        "CAPTURED",
        "captured",
    )
    + (
        "captured.by",
        "CELL.method",
        "super().of_base",
        "self.of_class",
        "flag.by",
        "FLAGS",
        "helper",
        "MORE",
        "CELL.compared",
    )
    + ("CELL.matched", "CELL.named")
)


@functools.lru_cache(maxsize=1)
def unseen() -> frozenset[str]:
    """Lookups that this Python makes and that were not noted; none where recordings can be believed."""
    space: dict[str, Any] = {"__name__": "onecards_probe"}
    exec(compile(_PROGRAM, "<probe>", "exec"), space)
    step = space["step"]
    ran = Ran(step, (), lambda tensor: False, lambda root: None, [x for x in space.values() if hasattr(x, "__code__")])
    with ran.watching():
        step()
    return WANTED - {guard.name for guard in ran.seen.guards}


def check() -> None:
    """
    Raises:
        RecordingError: this Python does not tell what a program looks up.
    """
    if unseen():
        raise RecordingError(
            f"Python {sys.version.split()[0]} does not tell what a step looks up ({', '.join(sorted(unseen()))}), so that a "
            "recording could repeat old values; recordings are known to work on Python 3.11 to 3.14. Call the step as it is, or "
            "take one of these, or a newer onecard"
        )
