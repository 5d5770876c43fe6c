"""torch.autocast around the calls of a step under a plan: casts of a look are not there when parameters take their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onecard as oc
from onecard.testing import run_ranks


def trained(plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, plan=oc.Plan(**plan, parameters="float32", compute="float32"))
    losses = []
    for call in range(5):
        draw = torch.Generator().manual_seed(call)
        x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 4, generator=draw)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(float(run(x, y)))
    return losses


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 4}], ids=str)
def test_autocast_around_the_calls(plan: dict[str, Any]) -> None:
    for found in run_ranks(trained, 2, plan):
        assert found == pytest.approx(trained(None), rel=2e-3)  # sums of bfloat16 products, in parts
