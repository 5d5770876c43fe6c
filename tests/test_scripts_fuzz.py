"""Random scripts for one card print the same on each level (``fuzz/scripts.py``)."""

from __future__ import annotations

from typing import Any

import pytest
from amounts import runs
from fuzz.scripts import PLANS, STEPS, difference, drawn, said, tried

from onecard.testing import run_ranks
from onecard.train.zero import reducer

CELLS = [
    ("auto", PLANS[0], 0), ("auto", PLANS[1], 10), ("auto", PLANS[3], 20), ("auto", PLANS[4], 30),
    ("auto", PLANS[7], 70), ("in place", PLANS[7], 80), ("in place", PLANS[8], 110), ("in place", PLANS[2], 40),
    ("recorded", {}, 50), ("in place, recorded", PLANS[1], 60),
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.share(3)
@pytest.mark.parametrize(("level", "plan", "first"), CELLS, ids=str)
def test_scripts(level, plan, first):
    for seed, count in runs(first, 4, 40):
        found = tried(range(seed, seed + count), level, plan)
        assert not found.wrong
        assert len(found.refused) + len(found.void) < count


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize(("plan", "first"), [(STEPS[1], 6538), (STEPS[2], 6502)], ids=str)
def test_scripts_whose_step_is_planned(plan, first):
    """One by one: a step that is refused leaves the other ranks' messages under way."""
    for seed, count in runs(first, 2, 40):
        found = [tried([number], "planned", plan) for number in range(seed, seed + count)]
        assert not any(one.wrong for one in found), found
        assert sum(len(one.refused) + len(one.void) for one in found) < count, found


def _half_heard(seeds: list[int], plan: dict[str, Any]) -> dict[int, str]:
    """As if what hears of a gradient that was added were lost when a parameter takes its place."""
    whole = reducer.hook
    reducer.hook = lambda param, before, after: whole(param, before, lambda _: None)
    return said(seeds, "auto", plan)


@pytest.mark.proof
def test_a_fault_is_found():
    seeds, plan = [3, 5, 6], {"dp": 2, "zero": 3}
    one, found = run_ranks(said, 1, seeds)[0], run_ranks(_half_heard, 2, seeds, plan)[0]
    assert any(difference(one[seed], found[seed], drawn(seed).close) for seed in seeds)
