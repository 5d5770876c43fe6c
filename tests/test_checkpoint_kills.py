"""SIGKILL in the middle of a save, here and there; `python tests/kill_points.py` does it at every operation."""

import pytest
from amounts import amount
from kill_points import sweep

from onecard.testing import run_ranks


@pytest.mark.proof
def test_a_kill_leaves_old_or_new() -> None:
    [tally] = run_ranks(sweep, 1, amount(16, 4), 5, timeout=amount(400, 2000))
    assert tally.points >= amount(8, 40) and tally.old + tally.new == tally.points and tally.old and tally.new
