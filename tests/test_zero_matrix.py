"""Seed 003's promise: every level and stage for 20 batches, two optimizers, with accumulation, clipping, tensor parallelism."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from amounts import amount
from test_zero import STAGES, batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard
BATCHES = 20  # as many steps, or 5 of 4 microbatches
LEVELS = ("os", "os_g", "p_g_os")
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
}
SETTINGS = [*product(OPTIMIZERS, (1, 4), (False, True))]  # microbatches; clipping


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7))


def trained(net: Any, optimizer: Any, place: Any, accumulate: int, clip: bool) -> list[Tensor]:
    """The losses of steps, as they are on this rank."""
    losses, data = [], batches()
    for _ in range(BATCHES // accumulate):
        for _ in range(accumulate):
            x, y = map(place, next(data))
            loss = cross_entropy(net(x), y) / accumulate
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def by_marks(stage: int, tp: bool, setting: tuple[str, int, bool]) -> list[float]:
    name, accumulate, clip = setting
    n, net = oc.get_world_size(), made()
    grid = torch.arange(n).view(-1, 2).tolist() if tp else [*range(n)]
    mesh = oc.ProcessMesh(grid, ["dp", "tp"][: 1 + tp])
    oc.shard_layer(net, mesh)
    if tp:
        net[1].weight = oc.shard_tensor(net[1].weight, mesh, [R, S(0)])
        net[3].weight = oc.shard_tensor(net[3].weight, mesh, [R, S(1)])
    optimizer = oc.shard_optimizer(OPTIMIZERS[name](net.parameters()), STAGES[stage]("dp", mesh))
    losses = trained(net, optimizer, lambda x: oc.shard_tensor(x, mesh, [S(0), R][: mesh.ndim]), accumulate, clip)
    return [loss.item() for loss in losses]


def by_level(level: str, setting: tuple[str, int, bool]) -> list[float]:
    name, accumulate, clip = setting
    n, rank, net = oc.get_world_size(), oc.get_rank(), made()
    net, optimizer, _ = fleet.group_sharded_parallel(net, OPTIMIZERS[name](net.parameters()), level)
    losses = torch.stack(trained(net, optimizer, lambda x: x.chunk(n)[rank], accumulate, clip))
    oc.all_reduce(losses, oc.ReduceOp.AVG)
    return [loss.item() for loss in losses]


def matrix() -> None:
    fleet.init(is_collective=True)
    for number, setting in enumerate(SETTINGS):
        net = made()
        alone = trained(net, OPTIMIZERS[setting[0]](net.parameters()), lambda x: x, *setting[1:])
        expected = pytest.approx([loss.item() for loss in alone], rel=1e-5)
        for at, (stage, level) in enumerate(zip(STAGES, LEVELS, strict=True)):
            if (number + at) % amount(4, 1):  # a quarter of the table: each stage and level, each setting
                continue
            few = oc.get_world_size() == 2
            if few == ((number + stage) % 2 == 0):  # each on 2 ranks or on 4; on 4 with tensor parallelism
                assert by_marks(stage, not few, setting) == expected, (stage, setting)
            else:
                assert by_level(level, setting) == expected, (level, setting)


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_batches_are_one_card(ranks: int) -> None:
    run_ranks(matrix, ranks)
