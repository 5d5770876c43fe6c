"""Random programs around an Engine print what they print on one card (``fuzz/engines.py``)."""

from __future__ import annotations

import pytest
from amounts import runs
from fuzz.engines import LEVELS, drawn, said, tried
from fuzz.scripts import difference

from onecard.engine import placing
from onecard.testing import run_ranks


@pytest.mark.proof
@pytest.mark.share(3)
@pytest.mark.parametrize(("level", "first"), [(level, 100 * i) for i, level in enumerate(LEVELS)])
def test_programs(level: str, first: int) -> None:
    for seed, count in runs(first, 2, 40):
        found = tried(range(seed, seed + count), level)
        assert not found.wrong
        assert len(found.refused) + len(found.void) < count


def _in_other_objects(seeds: list[int], level: str) -> dict[int, str]:
    """As if parameters were replaced when they are laid out, and what the program holds were left alone."""
    placing.swap.lay_out = lambda module, mesh, where, held: placing.swap.shard_layer(module, mesh)
    return said(seeds, level)


def test_a_fault_is_found() -> None:
    seeds, level = [*range(16, 21)], "dp"
    one, found = run_ranks(said, 1, seeds, level, True)[0], run_ranks(_in_other_objects, 2, seeds, level)[0]
    assert any(difference(one[seed], found[seed], drawn(seed, level).close) for seed in seeds)
