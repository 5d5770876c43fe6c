"""Random pipelines against one card; many more: ``PYTHONPATH=tests python -m fuzz.stages --count 500 --ranks 4``."""

from __future__ import annotations

import pytest
from amounts import amount
from fuzz.stages import draw, several

from onecard.testing import run_ranks


@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(amount(6, 20))), (4, range(100, amount(102, 108)))])
def test_random_pipelines_are_one_card(ranks: int, seeds: range) -> None:
    run_ranks(several, ranks, [*seeds])


def test_what_is_drawn() -> None:
    """The seeds of a few hundred programs have all that a pipeline may meet, and mixes of it."""
    drawn = [draw(seed, 2) for seed in range(300)]
    kinds = {op[0] for made in drawn for plan in made.plans for op in plan["ops"]}
    assert kinds == {
        "norm", "custom", "drop", "in place", "double", "merge", "same", "view", "expand", "mask", "masked", "none", "number",
        "batch norm",
    }  # fmt: skip
    assert len({made.mode for made in drawn}) == 14
    assert any("tied" in made.keys and made.recompute and made.clip for made in drawn)
    assert any(made.plans[0]["frozen"] and made.accumulate == 2 for made in drawn)
    assert draw(7, 2) == draw(7, 2) != draw(8, 2)
