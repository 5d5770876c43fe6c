"""What prove finds: planted faults with their operators, rounding told from faults, and no alarm in right programs."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from amounts import PROOF, share
from proof_rounding import CASES, pair
from torch import nn

import onecard as oc

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import faults, prove

ALL = faults.all_faults()


@pytest.mark.proof
def test_planted_faults_are_found_and_named():
    outcomes = [(fault, faults.tried(fault)) for fault in share(ALL, 6)]
    counted = [(fault, outcome) for fault, outcome in outcomes if not outcome.idle]
    missed = [fault.name for fault, outcome in counted if not outcome.found]
    unnamed = [f"{fault.name}: {outcome.said}" for fault, outcome in counted if not outcome.named]
    assert len(missed) <= 0.01 * len(counted), missed
    assert len(unnamed) <= 0.05 * len(counted), unnamed
    assert len(counted) >= (150 if PROOF else 4)


@pytest.mark.share(1)
@pytest.mark.parametrize(("fault", "operator", "wrong"), [
    ("ZeRO 2: a mean for a sum", "div", "the gradient of 2.bias in step 1"),
    ("ZeRO 1: one rank gets nothing", "mul", "0.weight"),
])  # fmt: skip
def test_what_is_wrong_behind_a_bucket_is_named_with_its_parameter(fault, operator, wrong):
    (found,) = [f for f in ALL if f.name == fault]
    with found.plant():
        proof = oc.prove(found.program, world=2, rounding=False)
    first = proof.first
    assert (first.operator, first.leads_to) == (operator, wrong) and first.inside, str(proof)
    assert first.ranks == ((1,) if "rank" in fault else (0, 1)) and "inside onecard at" in str(proof)
    assert proof.data()["first"]["leads_to"] == wrong


@pytest.mark.proof
@pytest.mark.parametrize("bug", share([*faults.programs.BUGS], 2))
def test_bugs_of_megatrons_kind_are_found_and_named(bug):
    (fault,) = [f for f in ALL if f.name == bug]
    outcome = faults.tried(fault)
    assert outcome.found and outcome.named, outcome.said


@pytest.mark.share(1)
@pytest.mark.parametrize("number", share(range(len(CASES)), 2))
def test_rounding_is_told_from_small_faults(number):
    world = (2, 3, 4)[number % 3]
    program, one = pair(CASES[number], 0.0)
    proof = oc.prove(program, world=world, against=one)
    assert proof and proof.exact, str(proof)
    assert proof.rounding[0] > 1e-5 and "in its own precision" in str(proof), proof.rounding
    program, one = pair(CASES[number], 1e-4)
    fault = oc.prove(program, world=world, against=one, rounding=False)
    assert not fault and not fault.rounded and fault.first is not None, str(fault)


@pytest.mark.share(1)
@pytest.mark.parametrize("normed", [True, False])
def test_a_gradient_that_is_zero_but_for_rounding_is_said_to_be_so(normed):
    """A bias ahead of a batch norm: judged beside what it is a sum of; where nothing cancels, nothing is said."""
    proof = oc.prove(partial(_ahead_of_a_norm, normed), world=2)
    assert proof and proof.rounding[0] < 1e-3, str(proof)  # it was 1.9, the bias beside itself
    said = "zero but for rounding: the gradient of 0.bias in step 1, the gradient of 0.bias in step 2; ranks and one card are"
    assert proof.data()["zero"] == proof.zero and (said in str(proof)) is normed, str(proof)
    if normed:
        off, summand = (float(re.search(rf"{word} ([\de.+-]+)", proof.zero)[1]) for word in ("card are", "up to"))
        assert off < 1e-4 * summand, proof.zero


def _ahead_of_a_norm(normed):
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if normed else nn.Tanh(), nn.Linear(6, 3))
    oc.shard_layer(model, mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = oc.shard_tensor(torch.randn(8, 4), mesh, [oc.Shard(0)])
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.proof
@pytest.mark.parametrize(("fault", "operator", "why"), [
    ("no sum of x's gradient", "mm", "their sum is missing"), ("the gradient of a sum is doubled", "mul", ""),
    ("data: copies count", "_foreach_norm", "a norm in which each of ranks [0, 1] counts the same"),
    ("FThenB: a microbatch is lost", "native_layer_norm", ""),
    ("fleet's data parallelism: message 2 mean", "all_gather", ""),
])  # fmt: skip
def test_faults_of_layers_clipping_and_schedules_are_named_where_they_are(fault, operator, why):
    (found,) = [f for f in ALL if f.name == fault]
    with found.plant():
        proof = oc.prove(found.program, world=2, rounding=False)
    assert proof.first.operator == operator and why in proof.first.why, str(proof)


AGAIN = [("cuts", 1), ("mixtures", 0)]
"""Were alarms once: a maximum over ranks of recordings, which looks at a float's bits; gradients on meshes of one rank each."""


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "seed"), [*AGAIN, *share([*prove.cases(0, 500)], 2)])
def test_random_right_programs_raise_no_alarm(kind, seed):
    verdict = prove.judge(kind, seed)
    assert verdict.kind != "wrong", verdict.why
