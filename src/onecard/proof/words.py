"""Ranks and lines in words."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch


def ranks_of(ranks: Sequence[int]) -> str:
    """Ranks in words.

    Example:
        >>> ranks_of([3]), ranks_of([0, 1]), ranks_of([])
        ('rank 3', 'ranks [0, 1]', 'no rank')
    """
    if not ranks:
        return "no rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def with_code(line: str) -> str:
    """``file:line`` with what stands there."""
    name, _, number = line.rpartition(":")
    code = linecache.getline(name, int(number)).strip() if number.isdigit() else ""
    shown = Path(name).name if name else line
    return f"{shown}:{number} (`{code}`)" if code else line


_PACKAGE, _ENGINE = Path(__file__).parents[1], str(Path(torch.__file__).parent)
_SILENT = tuple(str(_PACKAGE / room) for room in ("proof", "comm", "tensor/dispatch", "_torch", "recorded.py"))
"""What looks on, or only hands an operator or a message on: their lines say nothing."""


def library_line() -> str:
    """The innermost line of this package that runs an operator by itself; "" where it is the user's program that runs it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(_PACKAGE)):
            if not name.startswith(_SILENT):
                return f"{name}:{frame.f_lineno}"
        elif not name.startswith((_ENGINE, "<")):
            return ""
        frame = frame.f_back
    return ""
