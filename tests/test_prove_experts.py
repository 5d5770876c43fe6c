"""``oc.prove`` on mixtures, by marks and by hand: equal where they are right, a fault of the router found where it is."""

from __future__ import annotations

import pytest
from moe_proved import by_hand, by_marks

import onecard as oc


def test_mixtures_by_marks_are_proved() -> None:
    proof = oc.prove(by_marks, world=2, rounding=False)
    assert proof and proof.share > 0.95, proof


@pytest.mark.proof
def test_mixtures_by_hand_are_proved() -> None:
    # Rows go where a router's values say: a world that is proved has values, and no balanced sizes in their place.
    proof = oc.prove(by_hand, world=2, rounding=False)
    assert proof and proof.exact, proof


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("program", "fault", "said"),
    [
        (by_marks, "padding counted", "module 'router'"),
        (by_marks, "the balance loss' gradient doubled", "2 times the right value"),
        (by_hand, "the balance loss of each rank", "gradient of 0.gate.gate.weight"),
    ],
)
def test_faults_of_routers_are_found(program, fault: str, said: str) -> None:
    proof = oc.prove(program, fault, world=2, rounding=False)
    assert not proof and said in str(proof)
