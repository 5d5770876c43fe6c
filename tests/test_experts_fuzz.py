"""Random mixtures of experts on a mesh, and planted faults that must be seen."""

import pytest
from amounts import amount
from fuzz.moe import run


@pytest.mark.proof
def test_random_mixtures_are_those_of_one_card():
    assert run(range(amount(4, 300))) == []


@pytest.mark.proof
def test_a_routers_gradient_that_is_doubled_is_seen():
    assert len({m.seed for m, _ in run([3, 5], fault=2.0)}) == 2
