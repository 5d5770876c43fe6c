"""Evaluation beside a step of training under a plan: by the same plan, where the step has put the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import PlanError
from onecard.testing import run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.Dropout(0.5),
        nn.GELU(),
        nn.Linear(16, 5),
    ]
    return nn.Sequential(*layers)


def _trained(plan: dict[str, Any] | None) -> list[float]:
    """Losses of training, and of validation on another number of rows with its hits and predictions, in turns."""
    model = _model()
    model[4].p = 0.0  # microbatches drop others
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), list[float]()
    x, y, others, labels = (
        torch.randn(16, 8),
        torch.randint(0, 5, (16,)),
        torch.randn(24, 8),
        torch.randint(0, 5, (24,)),
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def validate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return F.cross_entropy(out, y), (out.argmax(1) == y).sum()

    def predict(x: Tensor) -> Tensor:
        return model(x)

    runs: list[Any] = [step, validate, predict]
    if plan is not None:
        runs = [oc.to_static(run, plan=oc.Plan(**plan)) for run in runs]
    for _ in range(3):
        model.train()
        model[4].p = 0.0
        found.append(runs[0](x, y).item())
        model.eval()
        model[4].p = 0.5
        with torch.no_grad():
            found += [oc.unshard(t).item() for t in runs[1](others, labels)]
            found += oc.unshard(runs[2](others[:7])).flatten().tolist()
    return found


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "microbatches": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2},
        {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2},
        {"pp": 2, "tp": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_as_on_one_card(plan: dict[str, int]) -> None:
    wanted = _trained(None)
    for found in run_ranks(_trained, plan.get("pp", 1) * plan.get("dp", 1) * plan.get("tp", 1), plan):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_before_a_step_of_training_it_says_what_to_do() -> None:
    model = _model()
    run = oc.to_static(lambda x: model(x), plan=oc.Plan(microbatches=2))
    with pytest.raises(PlanError, match="To evaluate beside a step of training"):
        run(torch.ones(4, 8))


def _in_inference_mode(plan: dict[str, Any] | None) -> list[float]:
    """Losses of training, and of an evaluation that begins inference mode itself, in turns."""
    model = _model()
    model[4].p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(16, 8), torch.randint(0, 5, (16,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.inference_mode()
    def validate(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    runs: list[Any] = [step, validate]
    if plan is not None:
        runs = [oc.to_static(run, plan=oc.Plan(**plan)) for run in runs]
    return [oc.unshard(run(x, y)).item() for _ in range(4) for run in runs]


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "plan", [{"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 1}, {"tp": 2}], ids=str
)
def test_an_evaluation_that_begins_inference_mode(plan: dict[str, int]) -> None:
    """It ended in torch's words on version counters."""
    wanted = _in_inference_mode(None)
    for found in run_ranks(_in_inference_mode, 2, plan):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def _reads_less(kind: str, planned: bool) -> list[float]:
    """Losses of a step that reads weights on several stages, or layers on which torch has a faster way to evaluate, in turns."""
    torch.manual_seed(0)
    if kind == "encoder":
        model: nn.Module = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)), nn.Linear(8, 4)
        )
    else:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 4))
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), list[float]()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        if kind == "penalty":
            loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        if kind == "two calls":
            loss = (loss + loss_of(x.flip(1), y)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    runs: list[Any] = [step, loss_of]
    if planned:
        runs = [oc.to_static(run, plan=oc.Plan(pp=oc.get_world_size(), microbatches=4)) for run in runs]
    for _ in range(3):
        x, y = torch.randn(8, 3, 8), torch.randint(0, 4, (8, 3))
        found.append(runs[0](x, y).item())
        model.eval()
        with torch.no_grad():
            found.append(runs[1](x, y).item())
        model.train()
    return found


@pytest.mark.share(2)
@pytest.mark.parametrize(("kind", "ranks"), [("penalty", 2), ("penalty", 3), ("two calls", 2), ("encoder", 2)])
def test_an_evaluation_that_reads_less_takes_nothing_away(kind, ranks):
    """A weight that training has on two stages was given back on one: the next step hung, or was refused."""
    wanted = _reads_less(kind, planned=False)
    for found in run_ranks(_reads_less, ranks, kind, True, timeout=120.0):
        assert found == pytest.approx(wanted, rel=1e-5)


def _engine(strategy: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = oc.Engine(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
    data = [(torch.randn(8), torch.tensor(i % 4)) for i in range(16)]
    made = engine.fit(data, data, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [*made.losses, *(float(epoch["val_loss"]) for epoch in made.epochs)]


def test_an_engine_evaluates_in_stages_whatever_its_microbatches_are():
    """Of eight rows in four microbatches of two: an evaluation is in one, and was asked for two rows."""
    pipeline = {"enable": True, "accumulate_steps": 4, "micro_batch_size": 2, "degree": 2}
    for found in run_ranks(_engine, 2, {"pipeline": pipeline}):
        assert found == pytest.approx(_engine(None), rel=1e-5)
