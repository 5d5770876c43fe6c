"""Parameters that a program freezes between backward and the step: their gradients are those of all ranks, as on one card."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import begin
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks


def _trained(frozen_at: int, accumulated: int, ours: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model = fleet.distributed_model(net) if ours else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if ours:
        optimizer = fleet.distributed_optimizer(optimizer)
    ranks, rank = (oc.get_world_size(), oc.get_rank()) if ours else (1, 0)
    generator = torch.Generator().manual_seed(1)
    for i in range(6):
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
        F.mse_loss(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
        if i == frozen_at:
            net[0].weight.requires_grad_(False)
        if i == frozen_at + 2:
            net[0].weight.requires_grad_(True)
        if i % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def _as_on_one_card() -> None:
    begin(dp=oc.get_world_size())
    for frozen_at in range(3):
        for accumulated in (1, 2, 3):
            found, wanted = (_trained(frozen_at, accumulated, ours) for ours in (True, False))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_ahead_of_the_step(ranks: int) -> None:
    run_ranks(_as_on_one_card, ranks)
