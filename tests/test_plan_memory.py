"""What a plan needs where it is laid out in place, measured beside the price."""

from __future__ import annotations

import pytest
import torch
from live_memory import eager_peak
from torch import nn

import onecard as oc
from onecard.errors import PlanError


def test_what_an_optimizer_computes_in_place_is_needed():
    """Weights that are large beside the batch: a recorded step is rid of each before the next, torch's loop is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    batch = torch.randn(16, 512), torch.randn(16, 512)

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    fixed = {"recompute": "none", "microbatches": 1}
    found = oc.plan(model, world=1, machine="A100", batch=batch, loss=loss_of, memory=0, fixed=fixed)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(*batch: torch.Tensor) -> None:
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(*batch)
    measured = eager_peak(step, optimizer, [*model.parameters()], *batch)
    assert found[0].cost.needs == pytest.approx(measured, rel=0.02)
    assert found[0].cost.peak < 0.85 * measured  # of a recorded step
    with pytest.raises(PlanError, match="what the optimizer computes for the largest one"):
        oc.plan(model, world=1, machine="A100", batch=batch, loss=loss_of, memory=int(0.97 * measured), fixed=fixed)
    oc.plan(model, world=1, machine="A100", batch=batch, loss=loss_of, memory=int(1.03 * measured), fixed=fixed)
