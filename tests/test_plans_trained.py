"""Programs of one card under plans that were found, and under random ones: one card's losses."""

from __future__ import annotations

import pytest
import torch
from amounts import PROOF
from fuzz.plans import CLOSE, compared, program_of, trained
from model_programs import library
from plan_programs import small

import onecard as oc
from onecard.auto.apply import PLAIN
from onecard.machine.cost import Machine
from onecard.testing import run_ranks

SLOW = Machine(latency=1e-9, bandwidth=1e12, memory=1e10, flops=1e9)
NAMES = sorted(small())


def _found(name: str, ranks: int, **fixed: int) -> oc.Plan:
    """The best plan of a program, on a machine on which it is worth while to divide even small layers."""
    program = program_of(name)
    torch.manual_seed(0)
    model = program.build()
    given = {**PLAIN, **fixed}
    return oc.plan(model, world=ranks, machine=SLOW, batch=program.batch(), loss=program.loss, fixed=given).best


def _under_found(names: list[str], ranks: int) -> list[tuple[str, str, float]]:
    """For each program the best plan, and the best of those that divide its layers: the worst difference of a loss."""
    said = []
    for name in names:
        wanted = trained(program_of(name), None)
        plans = [_found(name, ranks)]
        try:
            plans.append(_found(name, ranks, tp=ranks))
        except oc.errors.PlanError:  # nothing of it can be divided
            said.append((name, "no tp", 0.0))
        for plan in plans:
            found = trained(program_of(name), plan)
            worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
            said.append((name, "tp" if plan.placements else f"zero {plan.zero}", worst))
    return said


@pytest.mark.parametrize("ranks", [2, *([4] if PROOF else [])])
def test_under_the_plan_that_was_found(ranks):
    names = NAMES if PROOF else ["gpt wide", "mlp", "vit", "unet"]
    said = run_ranks(_under_found, ranks, names, ranks, timeout=60.0 * len(names))
    assert all(one == said[0] for one in said)  # every rank finds the same
    assert [found for found in said[0] if found[2] > CLOSE] == []
    assert len({name for name, how, _ in said[0] if how == "tp"}) >= len(names) - 2


@pytest.mark.parametrize("name", sorted(library()) if PROOF else ["GPT2LMHeadModel"])
def test_models_of_a_library(name):
    """Under random plans; and, as the search takes longest, in the proof alone under the plans that were found."""
    said = run_ranks(compared, 2, range(5 if PROOF else 2), 2, "", name, timeout=300.0)[0]
    assert [line for line in said if line.startswith("wrong")] == [] and "right" in said, said
    for found in run_ranks(_under_found, 2, [name], 2, timeout=600.0) if PROOF else ():
        assert found and [cell for cell in found if cell[2] > CLOSE] == []


def test_under_random_plans():
    seeds, ranks = range(200 if PROOF else 12), 2
    said = []
    for at in range(0, len(seeds), 20):
        part = seeds[at : at + 20]
        said += run_ranks(compared, ranks, part, ranks, timeout=30.0 * len(part))[0]
    assert [line for line in said if line != "right"] == []


def test_a_wrong_number_is_seen():
    said = run_ranks(compared, 2, range(1), 2, "loss")
    assert said[0][0].startswith("wrong: seed 0")
