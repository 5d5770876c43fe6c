"""Which tests, and how many cells of each, come through the blocks of src at the fewest CPU seconds: what ``make test`` keeps.

``python tests/covering.py REACH CPU_LOG SECONDS`` reads what ``tests/reach.py`` noted in the folder REACH, and the seconds that
the same run left in CPU_LOG (``ONECARD_ALL=1 ONECARD_CPU_LOG=CPU_LOG python tests/reach.py REACH -n 2``). It prints a line for
each test that is not kept whole: how many cells of how many (``@pytest.mark.share(n)``; 0: ``@pytest.mark.proof``), the seconds
of all, its name.

Whole are tests that are cheap, the pages and the docstrings, structure and words. Of the others those cells come first that
reach most new blocks in a second, as long as these are ``WORTH``; then one cell of each test with a planted fault, then one of
each other test, the cheapest first. (PYTEST_DONT_REWRITE)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import amounts
import reach

CHEAP = 0.8
"""CPU seconds of all cells of a test that is kept whole."""
WORTH = 2.0
"""New blocks for each CPU second."""
FAULTS, DEAR = re.compile(r"plant|fault|control|mutation|caught|wrong"), 2.0
"""Tests that something is found, of which one cell is kept, unless it takes as long."""
WHOLE = ("src/", "docs/", "README", "tests/test_docs.py", "tests/test_structure", "tests/test_words")


class Tests:
    """What the cells of each test reach and take, in the order in which pytest lists them."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.bits, self.seconds = reach.read(folder), dict(_seconds(log))
        self.cells: dict[str, list[str]] = defaultdict(list)
        for cell in _collected():
            if cell in self.bits and cell in self.seconds:
                self.cells[cell.partition("[")[0]].append(cell)

    @cache  # noqa: B019 - there is one
    def reached(self, test: str, count: int) -> int:
        found = 0
        for cell in self._share(test, count):
            found |= self.bits[cell]
        return found

    @cache  # noqa: B019
    def cost(self, test: str, count: int) -> float:
        return sum(self.seconds[cell] for cell in self._share(test, count))

    def _share(self, test: str, count: int) -> list[str]:
        return amounts.share(self.cells[test], count) if count else []


def chosen(tests: Tests, budget: float) -> tuple[dict[str, int], int]:
    """How many cells of each test, and the blocks that they reach."""
    sizes = {test: len(cells) for test, cells in tests.cells.items()}
    whole = {t: n for t, n in sizes.items() if t.startswith(WHOLE) or tests.cost(t, n) <= CHEAP}
    found, spent, covered = {**dict.fromkeys(sizes, 0), **whole}, 0.0, 0

    def take(test: str, count: int) -> None:
        nonlocal spent, covered
        spent += tests.cost(test, count) - (tests.cost(test, found[test]) if count != found[test] else 0.0)
        found[test], covered = count, covered | tests.reached(test, count)

    for test, count in whole.items():
        take(test, count)
    while best := max(_steps(tests, found, sizes, covered), default=None):
        worth, test, count = best
        if worth < WORTH or spent + tests.cost(test, count) - tests.cost(test, found[test]) > budget:
            break
        take(test, count)
    for planted in (True, False):
        rest = sorted((tests.cost(t, 1), t) for t, n in found.items() if not n)
        for cost, test in rest:
            named = FAULTS.search(test.rpartition("::")[2]) is not None
            if (named and cost <= DEAR) if planted else spent + cost <= budget:
                take(test, 1)
    return found, covered


def _steps(
    tests: Tests, found: dict[str, int], sizes: dict[str, int], covered: int
) -> Iterator[tuple[float, str, int]]:
    for test, have in found.items():
        for count in {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, sizes[test]}:
            if have < count <= sizes[test] and (new := (tests.reached(test, count) & ~covered).bit_count()):
                yield new / max(tests.cost(test, count) - tests.cost(test, have), 0.05), test, count


def _seconds(log: Path) -> Iterator[tuple[str, float]]:
    for line in log.read_text().splitlines():
        if row := re.match(r"((?:[\d.]+ )+)(\S.*)", line):
            yield row[2], sum(map(float, row[1].split()))


def _collected() -> list[str]:
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    environment = {**os.environ, "ONECARD_ALL": "1"}
    listed = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment).stdout
    return [line for line in listed.splitlines() if "::" in line]


def main() -> None:
    tests = Tests(Path(sys.argv[1]), Path(sys.argv[2]))
    found, covered = chosen(tests, float(sys.argv[3]))
    every = 0
    for test, cells in tests.cells.items():
        every |= tests.reached(test, len(cells))
        if found[test] < len(cells):
            print(f"{found[test]:4} of {len(cells):4} {tests.cost(test, len(cells)):7.1f} s {test}")
    kept = sum(tests.cost(test, count) for test, count in found.items())
    print(f"{covered.bit_count()} of {every.bit_count()} blocks in {kept:.0f} s")


if __name__ == "__main__":
    main()
