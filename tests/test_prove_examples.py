"""Every example and seed that trains is one card's, and of one card's values at least 98 % are found on the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import prove_programs as programs
import pytest
from amounts import share

import onecard as oc

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from prove_examples import ALL, LEAST


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("example", share(ALL, 2), ids=lambda example: example.name)
def test_an_example_is_one_cards(example):
    proof = example.prove(rounding=False)
    assert proof, str(proof)
    assert proof.compared >= 70 and proof.share >= LEAST, proof.alone


@pytest.mark.proof
def test_a_pair_that_is_not_equal_is_no_comparison():
    """Values of the same line that are unlike do not count: of a wrong program few of what follows."""
    right, wrong = (oc.prove(p, world=2, against=programs.one_card, rounding=False) for p in (programs.ddp, _off))
    assert right and right.share >= 0.98 and not wrong
    assert wrong.share < 0.8 and any("backward" in line for line in wrong.alone), (wrong.share, wrong.alone)


def _off():
    return programs.trained(programs.net(), lambda x: x * 1.5 if x.is_floating_point() else x)
