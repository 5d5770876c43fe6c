"""The table of habits and levels: every cell is one card's, or refused with words; faults that are planted are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from habits_levels import HABITS, LEVELS, check

from onecard import fleet
from onecard.testing import run_ranks

MARKS = tuple(level for level in LEVELS if level.startswith("ZeRO"))
BY_HAND = tuple(level for level in LEVELS if level not in MARKS)


def column(levels: tuple[str, ...], habits: tuple[str, ...], plant: Callable[[], None] | None = None) -> dict[str, str]:
    """What is wrong, by cell."""
    fleet.init(is_collective=True)
    if plant is not None:
        plant()
    found = {f"{name} at {level}": check(name, level) for level in levels for name in habits}
    return {cell: fault for cell, fault in found.items() if fault}


@pytest.mark.parametrize("levels", [MARKS, BY_HAND], ids=["marks", "by hand"])
def test_every_cell_is_one_card(levels: tuple[str, ...]) -> None:
    for wrong in run_ranks(column, 2, levels, tuple(HABITS), timeout=300):
        assert not wrong, "\n".join(f"{cell}: {fault}" for cell, fault in wrong.items())
