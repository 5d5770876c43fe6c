"""Random programs of chosen rows and experts in loops on a mesh, and a planted fault that must be seen."""

import pytest
from amounts import amount
from fuzz.rows import program, run


def test_random_programs_on_a_line_of_ranks_are_one_cards() -> None:
    assert run(range(amount(5, 300)), 2) == {}


@pytest.mark.proof
def test_random_programs_on_a_grid_are_one_cards() -> None:
    assert run(range(1000, 1000 + amount(3, 300)), 4, grid=True) == {}


def test_a_planted_fault_is_seen() -> None:
    seeds = [seed for seed in range(400) if "x.cumsum" in program(seed)[1] or "y.cumsum" in program(seed)[1]][:10]
    assert run(seeds, 2, fault="cumsum over a cut dim")
