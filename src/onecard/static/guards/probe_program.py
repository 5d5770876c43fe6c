"""A lookup of each kind, for ``self_test.py``, which runs this as a program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Base:
    of_base = 1


class Cell(Base):
    of_class = 1
    __match_args__ = ("matched",)

    def __init__(self) -> None:
        self.by, self.inner, self.compared, self.matched, self.named = 1, [1], 1, 1, 1

    def method(self) -> int:
        return super().of_base + self.of_class

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *_: object) -> None:
        pass


SCALE, CELL, FLAGS = 1, Cell(), [Cell()]
ITEMS = {"key": 1, "counted": 1}
MORE: dict[str, Any] = {"named": 1}


def made() -> Callable[[], int]:
    captured = Cell()
    return lambda: captured.by


def helper(*args: int, named: int) -> int:
    return named


CAPTURED = made()


def step() -> int:
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
