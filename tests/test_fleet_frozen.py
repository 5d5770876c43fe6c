"""Parameters that a program freezes between backward and the step: their gradients are those of all ranks, as on one card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import begin
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.side, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.head(self.body(x) + self.side(x) if part == 0 else self.body(x))  # the side is one rank's


Freezes = Callable[[Net, int, bool], None]


def _some_steps(net: Net, i: int, before: bool) -> None:
    if not before and i in (1, 3):
        net.body.weight.requires_grad_(i == 3)


def _what_one_rank_uses(net: Net, i: int, before: bool) -> None:
    if not before and i in (0, 2):
        net.side.requires_grad_(i == 2)


def _but_in_backward(net: Net, i: int, before: bool) -> None:
    net.body.requires_grad_(before and i > 0)


def _trained(freezes: Freezes, accumulated: int, ours: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net, ranks = Net(), oc.get_world_size()
    freezes(net, -1, before=True)
    model = fleet.distributed_model(net) if ours else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if ours:
        optimizer = fleet.distributed_optimizer(optimizer)
    generator = torch.Generator().manual_seed(1)
    for i in range(6):
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)
        freezes(net, i, before=True)
        parts = [oc.get_rank()] if ours else range(ranks)
        losses = [F.mse_loss(model(x.chunk(ranks)[part], part), y.chunk(ranks)[part]) for part in parts]
        torch.stack(losses).mean().backward()
        freezes(net, i, before=False)
        if i % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def _as_on_one_card() -> None:
    begin(dp=oc.get_world_size())
    for freezes in (_some_steps, _what_one_rank_uses, _but_in_backward):
        for accumulated in (1, 2, 3):
            found, wanted = (_trained(freezes, accumulated, ours) for ours in (True, False))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=f"{freezes.__name__}, {accumulated}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_ahead_of_the_step(ranks: int) -> None:
    run_ranks(_as_on_one_card, ranks)
