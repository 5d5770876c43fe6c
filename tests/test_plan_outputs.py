"""How activations of a plain model lie: sequence parallelism found over factors, held by the modules' outputs, on real ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz.plans import CLOSE
from live_memory import Counted
from plan_programs import GPT
from torch import Tensor, nn

import onecard as oc
from onecard.auto.rank import Job, begin
from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.planning.record import recorded
from onecard.planning.search.outputs import patterns_of
from onecard.planning.search.subject import subject_of
from onecard.testing import run_ranks

A100 = Machine.preset("A100")
TEXT = torch.zeros(2, 1024, dtype=torch.int64)
MEGATRON = {
    "blocks.*.out": "tp: Shard(1)",
    "blocks.*.down": "tp: Shard(1)",
    "blocks.*.norm": "tp: Replicate()",
    "blocks.*.behind": "tp: Replicate()",
}
"""What a sequence-parallel transformer does: sums are divided over time, and gathered behind the norms."""


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _large() -> nn.Module:
    return GPT(4096, 5, 16384, 1024, heads=32)  # built without memory: nobody else calls it


def _found(weight: int) -> oc.Plan:
    subject = subject_of(_large, (TEXT, TEXT), _loss, {})
    return subject.placed(replace(subject.base, tp=4, microbatch=2), A100)[weight]


@pytest.mark.proof
def test_sequence_parallelism_comes_out():
    """Of a plain transformer, for time alone: sums are divided over time, and gathered behind the norms."""
    plan = _found(0)
    found = dict(plan.outputs)
    assert {"blocks.*.norm", "blocks.*.behind"} <= {n for n, text in found.items() if text == "tp: Replicate()"}
    assert "tp: Shard(1)" in (found.get("blocks.*.out"), found.get("blocks.*.down"))
    ask = {"machine": A100, "batch": (TEXT, TEXT), "loss": _loss}
    with_it, without = (oc.price(_large, one, **ask) for one in (plan, replace(plan, outputs=())))
    assert with_it.seconds < 0.99 * without.seconds
    assert with_it.terms["messages along 'tp'"] < 0.7 * without.terms["messages along 'tp'"]


def test_it_sends_no_more_and_keeps_less():
    """Of Megatron's cuts: sums become their two halves, of the same bytes; a rank keeps a part of what lies between layers."""
    plan = replace(PLAN, tp=4, microbatch=2)
    with_it, without = (
        recorded(_large, one, (TEXT, TEXT), _loss).costs(A100)[2] for one in (plan, replace(plan, outputs=()))
    )
    assert with_it.sent["tp"] == without.sent["tp"] > 0
    between = 2 * 1024 * 4096 * 4  # bytes of one activation between layers: two sums are kept for the norms
    assert without.kept - with_it.kept > between


@pytest.mark.proof
def test_where_memory_is_short_activations_are_divided():
    """Under Megatron's cuts it fits where it would not without, and takes less time than to compute again."""
    text = torch.zeros(8, 1024, dtype=torch.int64)
    ask = {"world": 4, "machine": A100, "batch": (text, text), "loss": _loss}
    fixed = {"tp": 4, "placements": CUTS, "microbatches": 1}
    whole = oc.plan(_large, **ask, fixed={**fixed, "outputs": ()})
    limit = whole.cost.peak - 2**28
    divided = oc.plan(_large, **ask, fixed={**fixed, "outputs": tuple(MEGATRON.items())}, memory=limit)
    other = oc.plan(_large, **ask, fixed={**fixed, "outputs": ()}, memory=limit)
    assert divided.best.recompute == "none" != other.best.recompute
    assert divided.cost.peak <= limit and divided.cost.seconds < 0.9 * other.cost.seconds


def test_patterns_fit_nothing_else():
    model = nn.Module()
    for i in range(2):
        setattr(model, f"block{i}", nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
    star = lambda name: name.replace("block0", "*").replace("block1", "*") if name.count(".") < 2 else name  # noqa: E731
    assert patterns_of({"block0.0": 4}, star, model) == (("block0.0", "tp: Shard(1)"), ("block1.0", "tp: Shard(1)"))
    assert patterns_of({"block0.1": 1}, star, model) == (("*.1", "tp: Replicate()"),)


# -- on ranks --------------------------------------------------------------------------------------------------------------

CUTS = (
    ("blocks.*.query.*", "tp: Shard(0)"),
    ("blocks.*.key.*", "tp: Shard(0)"),
    ("blocks.*.value.*", "tp: Shard(0)"),
    ("blocks.*.out.weight", "tp: Shard(1)"),
    ("blocks.*.up.*", "tp: Shard(0)"),
    ("blocks.*.down.weight", "tp: Shard(1)"),
)
PLAN = oc.Plan(
    tp=2, per_host=0, parameters="float32", compute="float32", placements=CUTS, outputs=tuple(MEGATRON.items())
)


def _trained(plan: oc.Plan | None, habit: str = "", rows: int = 4) -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)
    model = GPT(32, 3, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
        for name in ("blocks.1.out", "blocks.1.behind", "blocks.1.down"):
            model.get_submodule(name).register_forward_hook(lambda m, args, out: seen.append(out.placements[-1]))
    other = copy.deepcopy(model) if habit == "average" else model
    draw, losses = torch.Generator().manual_seed(1), []
    for step in range(4):
        x = torch.randint(
            0, 64, (rows - (habit == "last batch" and step == 2), 15 if habit == "odd" else 16), generator=draw
        )
        loss = _loss(model, x, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if habit == "average":
            with torch.no_grad():
                for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
                losses.append(_loss(other, x, x).item())
        if habit == "eval":
            model.eval()
            with torch.inference_mode():
                losses.append(_loss(model, x[:1], x[:1]).item())
            model.train()
    return losses, [str(where) for where in seen[:3]]


HABITS = ("", "average", "eval", "odd", "last batch")


def _habits(plan: oc.Plan) -> dict[str, tuple[float, list[Any]]]:
    found = {}
    for habit in HABITS:
        wanted, (losses, seen) = _trained(None, habit)[0], _trained(plan, habit)
        found[habit] = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)), seen
    return found


@pytest.mark.proof
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, PLAN),
        (2, replace(PLAN, recompute="full")),
        (2, replace(PLAN, outputs=tuple((name, text.replace("(1)", "(0)")) for name, text in PLAN.outputs))),
        (4, replace(PLAN, dp=2, zero=1)),
    ],
)
def test_as_on_one_card(ranks, plan):
    """Also where the length, or the rows, cannot be divided; and their outputs lie as the plan says."""
    dim = "S(0)" if "Shard(0)" in str(plan.outputs) else "S(1)"
    for found in run_ranks(_habits, ranks, plan):
        assert {habit: worst for habit, (worst, _) in found.items() if worst > CLOSE} == {}
        out, behind, down = found[""][1]
        assert [out, behind, down] == [dim, "R", dim]


def _recorded(plan: oc.Plan) -> list[float]:
    torch.manual_seed(0)
    model = GPT(32, 3, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        loss = _loss(model, x, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = oc.to_static(step, plan=plan)
    draw = torch.Generator().manual_seed(1)
    return [run(torch.randint(0, 64, (4, 16), generator=draw)).item() for _ in range(4)]


@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "more"), [(2, {}), (2, {"microbatches": 2}), (4, {"pp": 2, "microbatches": 2})])
def test_recorded_steps(ranks, more):
    wanted = _trained(None)[0]
    for found in run_ranks(_recorded, ranks, replace(PLAN, **more), timeout=120.0):
        assert max(abs(a - b) / b for a, b in zip(found, wanted, strict=True)) < CLOSE


def _kept(plan: oc.Plan) -> int:
    model = GPT(64, 3, 64, 256)
    oc.parallelize(model, plan=plan)
    x = torch.zeros(4, 256, dtype=torch.int64)
    counted = Counted([*model.parameters()])
    with counted:
        loss = _loss(model, x, x)
    counted.peak = 0
    counted.look(loss)
    return counted.peak  # of what is alive behind forward


@pytest.mark.proof
def test_a_rank_keeps_less():
    for with_it, without in zip(run_ranks(_kept, 2, PLAN), run_ranks(_kept, 2, replace(PLAN, outputs=())), strict=True):
        assert with_it < without - 3 * 4 * 256 * 64 * 4  # half of two activations between layers, of three blocks


def _saved(folder: str) -> bool:
    begin(Job(PLAN).to_json())
    model = GPT(32, 2, 64, 16)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.zeros(4, 16, dtype=torch.int64)
    _loss(model, x, x).backward()
    optimizer.step()
    torch.save(model, Path(folder) / "model.pt")
    return bool(model.blocks[0].out._forward_hooks)


def test_a_model_that_is_saved_whole_has_no_hooks_of_ours(tmp_path):
    assert all(run_ranks(_saved, 2, str(tmp_path)))
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert model.blocks[0].out.weight.shape == (32, 32) and not model.blocks[0].out._forward_hooks
    assert torch.isfinite(model(torch.zeros(1, 16, dtype=torch.int64))).all()


# -- mistakes --------------------------------------------------------------------------------------------------------------


def test_mistakes():
    with pytest.raises(
        PlanError, match=r"outputs=.*: 'tp: Partial' \(of '\*'\) does not say how outputs of modules lie"
    ):
        oc.Plan(tp=2, outputs=(("*", "tp: Partial"),))
    plan = oc.Plan(outputs=(("blocks.*.mlp", "tp: Shard(1)"),), parameters="float32")
    with pytest.raises(PlanError, match=r"outputs name 'blocks.\*.mlp', and GPT has no such module"):
        oc.parallelize(GPT(32, 2, 64, 16), plan=plan)
    with pytest.raises(PlanError, match=r"outputs: 'blocks.\*.mlp' fits no module"):
        oc.price(GPT(32, 2, 64, 16), plan, A100, batch=(TEXT[:, :16], TEXT[:, :16]), loss=_loss)
