"""How much of what is drawn or listed the tests try: a share in ``make test``, all of it in ``make proof`` (ONECARD_PROOF=1).

A share goes through the whole list in even steps, so that each kind in it is met; it is the same at each run. The seeds of a
proof are others for each state of src, so that each release is tried with programs that nobody has tried; ONECARD_SEEDS=N has
those of an earlier one again, whose header said N.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

T, R, C = TypeVar("T"), TypeVar("R"), TypeVar("C")
SRC = Path(__file__).parents[1] / "src"

PROOF = os.environ.get("ONECARD_PROOF", "") not in ("", "0")
ALL = PROOF or os.environ.get("ONECARD_ALL", "") not in ("", "0")
"""No test and no cell is left to a proof; without a proof, of each the share that ``make test`` tries."""


def amount(quick: int, proof: int) -> int:
    """A number of programs, cases or calls."""
    return proof if PROOF else quick


def share(items: Iterable[T], quick: int) -> list[T]:
    """All of them, or ``quick`` of them, evenly spread from the first to the last."""
    listed = list(items)
    if PROOF or quick >= len(listed):
        return listed
    return [listed[i * (len(listed) - 1) // max(quick - 1, 1)] for i in range(quick)]


def cells(rows: Sequence[R], columns: Sequence[C], every: int) -> list[tuple[R, C]]:
    """All cells of a table, or each ``every``-th of a row, the next row beginning one further.

    Each row has one, and each column, as long as there are ``every`` of both.
    """
    every = 1 if PROOF else min(every, len(rows), len(columns))
    return [(r, c) for i, r in enumerate(rows) for j, c in enumerate(columns) if (i + j) % every == 0]


def seeds(first: int, quick: int, proof: int) -> list[int]:
    """Those from ``first`` on; of a proof, ``proof`` more that are its own."""
    fixed = range(first, first + quick)
    return [*fixed, *range(base() + first, base() + first + proof - quick)] if PROOF else [*fixed]


def runs(first: int, quick: int, proof: int) -> list[tuple[int, int]]:
    """The same as (first seed, how many)."""
    return [(first, quick), *([(base() + first, proof - quick)] if PROOF else [])]


def patience(seconds: float) -> float:
    """A bound for what takes so long at most where nothing else runs; more, where this machine has more to do."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@cache
def base() -> int:
    """What a proof adds to its seeds."""
    given = os.environ.get("ONECARD_SEEDS")
    return int(given) if given else 10_000_000 + int(tree(), 16) % 1_000_000 * 1000


def tree() -> str:
    """A name for the state of src."""
    found = hashlib.sha256()
    for path in sources():
        found.update(f"{path.relative_to(SRC)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def sources() -> Iterator[Path]:
    yield from sorted(SRC.rglob("*.py"))
