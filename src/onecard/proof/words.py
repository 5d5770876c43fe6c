"""Ranks and lines in words."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from pathlib import Path


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
