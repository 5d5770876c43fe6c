"""Optimizers in pipelines that are cut out of recordings: states that are read before any gradient is, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.testing import run_ranks


def losses(name: str, foreach: bool, plan: oc.Plan | None = None) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.5, foreach=foreach)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, plan=plan)
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    return [run(x, y).item() for _ in range(3)]


def _planned() -> list[list[float]]:
    return [losses("Adadelta", each, oc.Plan(pp=2, microbatches=2)) for each in (False, True)]


def test_states_read_before_gradients() -> None:
    """Adadelta reads its ``acc_delta`` before it meets a gradient: it is where the result goes, not on all ranks."""
    card = losses("Adadelta", False)
    for found in run_ranks(_planned, 2):
        assert found == [pytest.approx(card, rel=1e-5)] * 2
