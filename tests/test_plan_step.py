"""A step of training, a function of its batch: planned as its parts are, and trained under plans with one card's losses."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from amounts import PROOF, patience
from plan_programs import MLP, Program, small, step_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import onecard as oc
from onecard.engine import planned
from onecard.errors import EngineError, PlanError, RecordingError
from onecard.machine.cost import Machine
from onecard.planning.step_parts import parts_of_step
from onecard.testing import run_ranks

SLOW = Machine(latency=1e-9, bandwidth=1e12, memory=1e10, flops=1e9)
CLOSE = 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    """Blocks, between which a pipeline is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOWER = Program(Tower, lambda: (torch.randn(8, 8), torch.randint(4, (8,))), lambda m, x, y: F.cross_entropy(m(x), y))


# -- planned -----------------------------------------------------------------------------------------------------------------


def test_operators_that_are_decomposed_are_planned():
    """Whether a decomposition gives what its operator gives is tried on tensors that are no part of the step."""
    lay = lambda: nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    program = Program(lay, TOWER.batch, TOWER.loss)
    _, _, step = step_of(program)
    assert oc.plan(step, world=2, machine=SLOW, batch=program.batch()).best.world == 2


@pytest.mark.parametrize("name", ["mlp", *(["gpt wide"] if PROOF else [])])
def test_the_same_plans_as_of_its_parts(name):
    program = small()[name]
    model, _, step = step_of(program)
    batch = program.batch()
    found = oc.plan(step, world=2, machine=SLOW, batch=batch)
    assert str(found) == str(oc.plan((model, program.loss, None, batch), world=2, machine=SLOW))
    assert str(found) == str(oc.plan(oc.to_static(step), world=2, machine=SLOW, batch=batch))


def test_nothing_is_done():
    model, optimizer, step = step_of(small()["mlp"])
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    parts = parts_of_step(step, small()["mlp"].batch())
    batch_drawn = torch.get_rng_state()  # by the batch alone
    assert parts.model is model and parts.optimizers == (optimizer,)
    assert not torch.nn.modules.module._has_any_global_hook()  # torch.compile would warn of it
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    torch.set_rng_state(random)
    small()["mlp"].batch()
    assert torch.equal(torch.get_rng_state(), batch_drawn)


def test_what_is_made_of_the_batch_around_the_model():
    """Ahead of it, behind it, of labels alone, in place, by a second call, without gradients."""
    net, teacher = MLP(8, 16), nn.Linear(8, 8).requires_grad_(False)

    def step(x: Tensor, y: Tensor, scale: Tensor) -> None:
        x = (x * scale).clone()
        x.add_(1)
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(net(x).flatten(), y.flatten()) + F.mse_loss(net(x * 2), wanted)
        loss.backward()

    given = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    parts = parts_of_step(step, given)
    assert [*map(id, parts.batch)] == [id(given[0]), id(given[1])]
    loss = parts.loss(net, *(x[:4] for x in parts.batch))
    assert loss.shape == () and loss.requires_grad
    assert oc.plan(step, world=2, machine=SLOW, batch=given).best.world == 2


class Asks(nn.Module):
    """As a library's model does that warns of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        if 0 in x[:, [-1, 0]] and not torch.equal(x, x):
            raise ValueError("padding")
        return self.table(x)


class Samples(nn.Module):
    """As variational models do: a distribution looks whether what it is made of is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_scale = self.layer(x.float()).chunk(2, 1)
        found = torch.distributions.Normal(mean, log_scale.exp())
        return torch.distributions.kl_divergence(found, torch.distributions.Normal(0.0, torch.ones(4)))


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", [Asks, Samples])
def test_what_a_model_reads_of_its_inputs_is_guessed(kind):
    net, batch = kind(), torch.randint(1, 5, (4, 3))

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()

    found = oc.plan(step, world=2, machine=SLOW, batch=batch)
    assert str(found) == str(oc.plan(net, world=2, machine=SLOW, batch=batch, loss=lambda m, x: m(x).square().mean()))


def _twice(x: Tensor, net: nn.Module) -> None:
    net(x).sum().backward()
    net(x).sum().backward()


def _reads(x: Tensor, net: nn.Module) -> None:
    loss = net(x).sum()
    if loss.item() > 0:
        loss.backward()


def _two_models(x: Tensor, net: nn.Module, other: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other(net(x)).sum().backward()
    optimizer.step()


def _counts_rows(x: Tensor, net: nn.Module) -> None:
    net(x).view(x.shape[0] * 2, 2).square().mean().backward()


MISTAKES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "two backwards": (_twice, {}, PlanError, r"calls backward\(\) 2 times, and a plan is for one"),
    "no backward": (lambda x, net: net(x), {}, PlanError, r"calls no backward\(\)"),
    "reads values": (_reads, {}, RecordingError, r"test_plan_step.py:\d+: its value is read"),
    "two models": (_two_models, {}, PlanError, r"trains 2 parameter\(s\) that are not of Linear"),
    "no batch": (_reads, {"batch": None}, PlanError, r"give what it is called with, batch=\(x, y\)"),
    "a loss": (_reads, {"loss": nn.MSELoss()}, PlanError, "no loss, which it makes itself"),
    "a builder with arguments": (lambda width: nn.Linear(width, 4), {"batch": None}, PlanError, "takes no arguments"),
    "rows as numbers": (
        _counts_rows,
        {"fixed": {"microbatches": 2}},
        PlanError,
        "in place of numbers of rows write -1",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_step_to_plan_is_told(name):
    step, given, kind, words = MISTAKES[name]
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    batch = (torch.randn(4, 4), one, two, optimizer)[: len(inspect.signature(step).parameters)]
    with pytest.raises(kind, match=words):
        oc.plan(step, world=2, machine=SLOW, **{"batch": batch, **given})


# -- trained -----------------------------------------------------------------------------------------------------------------

FLOAT: dict[str, Any] = {"per_host": 0, "parameters": "float32", "compute": "float32"}
MEGATRON = (
    ("blocks.*.up.*", "tp: Shard(0)"),
    ("blocks.*.down.weight", "tp: Shard(1)"),
    ("head.weight", "tp: Shard(0)"),
)
TWO = {
    "ZeRO-1": oc.Plan(dp=2, zero=1, **FLOAT),
    "ZBV": oc.Plan(pp=2, schedule="ZBV", virtual=2, microbatches=8, **FLOAT),
    "stages of three blocks and one": oc.Plan(pp=2, stages=(3, 1), microbatches=4, **FLOAT),
    "tp": oc.Plan(tp=2, placements=MEGATRON, **FLOAT),
    "microbatches": oc.Plan(dp=2, zero=1, microbatches=2, **FLOAT),
    "two blocks again": oc.Plan(dp=2, zero=2, recompute="full", recompute_blocks=2, **FLOAT),
}
FOUR = {
    "pp x dp": oc.Plan(pp=2, dp=2, microbatches=2, zero=1, **FLOAT),
    "pp x tp": oc.Plan(pp=2, tp=2, placements=MEGATRON, microbatches=4, schedule="ZBH1", **FLOAT),
    "dp x tp": oc.Plan(dp=2, tp=2, zero=3, placements=MEGATRON, microbatches=2, recompute="full", **FLOAT),
    "replicas": oc.Plan(dp=4, replicas=2, zero=3, **FLOAT),
}


def _trained(plan: oc.Plan | str | None, fault: bool = False) -> list[float]:
    *_, step = step_of(TOWER)
    run: Any = step if plan is None else oc.to_static(step, plan=plan, **({"avg": False} if fault else {}))
    found = []
    for i in range(5):
        torch.manual_seed(i)
        found.append(run(*TOWER.batch()).item())
    return found


def _worst(plans: dict[str, oc.Plan], fault: bool = False) -> dict[str, float]:
    wanted = _trained(None)
    errors = {}
    for name, plan in plans.items():
        found = _trained(plan, fault)
        errors[name] = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    return errors


def _summed() -> tuple[dict[str, float], str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return _worst({"microbatches": TWO["microbatches"]}, fault=True), str([str(w.message) for w in told])


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, *([4] if PROOF else [])])
def test_as_on_one_card(ranks):
    plans = TWO if ranks == 2 else FOUR
    plans = (
        plans if PROOF else {name: plans[name] for name in ("ZeRO-1", "stages of three blocks and one", "microbatches")}
    )
    for errors in run_ranks(_worst, ranks, plans, timeout=patience(120.0)):
        assert {name: error for name, error in errors.items() if error > CLOSE} == {}


@pytest.mark.proof
def test_a_wrong_mean_is_seen():
    for errors, said in run_ranks(_summed, 2):
        assert errors["microbatches"] > CLOSE and "avg=False: the loss is a mean over rows" in said


def _auto() -> tuple[list[float], list[float], str]:
    with patch.object(planned, "this_machine", lambda: SLOW):
        program = small()["mlp"]
        losses = []
        for plan in (None, "auto"):
            model, _, step = step_of(program)
            run: Any = step if plan is None else oc.to_static(step, plan=plan)
            torch.manual_seed(5)
            batch = program.batch()
            losses.append([run(*batch).item() for _ in range(5)])
    return (
        losses[0],
        losses[1],
        f"{run.plan.world} {len(run.recordings)} {isinstance(next(model.parameters()), oc.DistTensor)}",
    )


def test_the_plan_is_found_at_the_first_call():
    for wanted, found, said in run_ranks(_auto, 2):
        assert found == pytest.approx(wanted, rel=CLOSE) and said == "2 1 True"


def test_what_does_not_go_with_a_plan_is_told():
    plan = oc.Plan(**FLOAT)
    *_, step = step_of(small()["mlp"])
    for given, words in (
        ({"k_steps": 2}, "is the plan's to say"),
        ({"loss": nn.MSELoss()}, "inside: leave all others out"),
    ):
        with pytest.raises(EngineError, match=words):
            oc.to_static(step, plan=plan, **given)
    with pytest.raises(EngineError, match="a plan is of a step"):
        oc.to_static(nn.Linear(2, 2), plan=plan)
    with pytest.raises(PlanError, match="made for another program"):
        planned.starts_of(oc.Plan(pp=2, stages=(2, 1), microbatches=2), MLP(4, 8))


def test_layers_that_are_called_one_by_one_are_named_with_their_model():
    net = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor) -> None:
        net["two"](net["one"](x)).sum().backward()
        optimizer.step()

    with pytest.raises(
        PlanError, match=r"calls layers of net one by one.*call net\(\.\.\.\).*oc.parallelize\(net, optimizer"
    ):
        oc.plan(step, batch=(torch.randn(4, 4),), world=2, machine=SLOW)


@dataclass
class Scored:
    """What a model returns of which torch knows nothing."""

    loss: Tensor
    scores: list[Tensor]


class Classifier(nn.Module):
    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 3), made

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.layer(x)
        return self.made(loss=F.cross_entropy(scores, y), scores=[scores])


@pytest.mark.parametrize("made", [Scored, SimpleNamespace, dict])
def test_a_model_may_return_an_object(made):
    """Its tensors were not found: "what backward() begins with is made by no module's forward"."""
    model = Classifier(made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> None:
        result = model(x, y)
        (result["loss"] if made is dict else result.loss).backward()
        optimizer.step()

    x, y = torch.randn(6, 4), torch.arange(6) % 3
    parts = parts_of_step(step, (x, y))
    assert parts.model is model and len(parts.batch) == 2
    found = model(x, y)
    torch.testing.assert_close(parts.loss(model, x, y), found["loss"] if made is dict else found.loss)
