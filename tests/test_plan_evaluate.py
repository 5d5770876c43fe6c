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


@pytest.mark.share(2)
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
