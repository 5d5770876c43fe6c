"""Programs of one card under plans that were found, and under random ones: one card's losses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from amounts import PROOF, patience
from fuzz.plans import CLOSE, chosen, compared, drawn, each_under, program_of, trained
from model_programs import library
from plan_programs import small
from torch import nn

import onecard as oc
from onecard.auto.apply import PLAIN
from onecard.testing import run_ranks

NAMES = sorted(small())


def _under_found(names: list[str], ranks: int) -> list[tuple[str, str, float]]:
    """For each program the best plan, and the best of those that divide its layers: the worst difference of a loss."""
    said = []
    for name in names:
        wanted = trained(program_of(name), None)
        plans = [chosen(name, ranks, **PLAIN)]
        try:
            plans.append(chosen(name, ranks, **PLAIN, tp=ranks))
        except oc.errors.PlanError:  # nothing of it can be divided
            said.append((name, "no tp", 0.0))
        for plan in plans:
            found = trained(program_of(name), plan)
            worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
            said.append((name, "tp" if plan.placements else f"zero {plan.zero}", worst))
    return said


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, *([4] if PROOF else [])])
def test_under_the_plan_that_was_found(ranks):
    names = NAMES if PROOF else ["gpt wide", "mlp", "unet"]
    said = run_ranks(_under_found, ranks, names, ranks, timeout=60.0 * len(names))
    assert all(one == said[0] for one in said)  # every rank finds the same
    assert [found for found in said[0] if found[2] > CLOSE] == []
    assert len({name for name, how, _ in said[0] if how == "tp"}) >= len(names) - 2


def _plans(name: str, ranks: int) -> list[oc.Plan]:
    """Those that are chosen: of all, along tp, as a pipeline; and five random ones."""
    fixed: list[dict[str, int]] = [{**PLAIN}, {**PLAIN, "tp": 2}, {"pp": 2}]
    return [*(chosen(name, ranks, **one) for one in fixed), *(drawn(seed, ranks, name)[1] for seed in range(5))]


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(library()))
def test_models_of_a_library(name, ranks):
    """Unmodified."""
    plans = _plans(name, ranks)
    for said in run_ranks(each_under, ranks, name, plans, timeout=patience(200.0)):
        cut = [
            plan.pp > 1 or plan.microbatches > 1 for plan in plans
        ]  # what a model reads of its inputs is not all there
        reads = ["depends on data" in words or "about values of its batch" in words for words in said]
        refused = [told and parts for told, parts in zip(reads, cut, strict=True)]
        assert [words for words, no in zip(said, refused, strict=True) if words != "right" and not no] == []
        assert name.startswith("Deberta") or not any(refused)


@pytest.mark.proof
def test_under_random_plans():
    seeds, ranks = range(200 if PROOF else 1), 2
    said = []
    for at in range(0, len(seeds), 20):
        part = seeds[at : at + 20]
        said += run_ranks(compared, ranks, part, ranks, timeout=patience(30.0 * len(part)))[0]
    assert [line for line in said if line.startswith("wrong")] == []
    assert said.count("right") >= 0.9 * len(said), said  # others are refused, with words


def test_a_wrong_number_is_seen():
    said = run_ranks(compared, 2, range(1), 2, "loss")
    assert said[0][0].startswith("wrong: seed 0")


def _told(name: str) -> list[str]:
    """What a program is told in microbatches beside data parallelism, where layers run on parts of tensors."""
    plan = oc.Plan(dp=2, microbatches=2, per_host=0, parameters="float32", compute="float32")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(program_of(name), plan, 2)
    return [str(w.message) for w in said]


@pytest.mark.proof
def test_layers_that_run_on_parts_of_a_batch():
    """A recurrent layer keeps rows apart there; a norm's backward, which writes in place, is no hook. Neither is refused."""
    assert run_ranks(_told, 2, "gru") == [[], []]
    for said in run_ranks(_told, 2, "resnet"):
        assert said and all("batch norm" in words for words in said)


def _under_schedules(plans: list[dict[str, Any]]) -> list[list[float]]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = oc.to_static(step, plan=oc.Plan(**plan)) if plan else step
        draw = torch.Generator().manual_seed(1)
        found.append([run(torch.randn(8, 6, generator=draw)).item() for _ in range(3)])
    return found


def test_every_kind_of_schedule_of_a_plan_trains():
    """A plan with several stages on each rank was refused in a recorded step, by what a loop of its own cannot have."""
    both = {"pp": 2, "microbatches": 4}
    kinds = [("F-then-B", 1), ("1F1B", 1), ("VPP", 2), ("BFS", 2), ("ZBH1", 1), ("ZBV", 2)]
    expected = _under_schedules([{}])[0]
    for ranks in run_ranks(
        _under_schedules, 2, [both | {"schedule": name, "virtual": n} for name, n in kinds], timeout=120.0
    ):
        for found in ranks:
            assert found == pytest.approx(expected, rel=1e-5)
