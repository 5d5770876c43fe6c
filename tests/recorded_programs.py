"""Steps that are recorded in pretended worlds, to be proved beside that of one card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import onecard as oc
from onecard import fleet
from onecard.fleet import meta_parallel as mp

Recording = Any


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that are the same in every precision."""
    at = torch.arange(64.0).view(8, 8) * (seed + 1)
    return at.sin(), (at + 1).cos()


def stepped(model: nn.Module, optimizer: Any, clip: float = 0.1) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return step


def marked(zero: int = 0, k_steps: int = 0) -> Recording:
    """Marks on dp x tp; ``k_steps``: replays of so many microbatches."""
    torch.manual_seed(0)
    n = oc.get_world_size()
    mesh = oc.ProcessMesh(np.arange(n).reshape(min(n, 2), -1), ["dp", "tp"])
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Dropout(0.1), nn.Linear(6, 8), nn.LayerNorm(8))
    for i, dim in ((0, 0), (3, 1)):
        model[i].weight = nn.Parameter(oc.shard_tensor(model[i].weight.data, mesh, [oc.Replicate(), oc.Shard(dim)]))
    oc.shard_layer(model, mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    if zero:
        stage = (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)[zero - 1]
        optimizer = oc.shard_optimizer(optimizer, stage("dp", mesh))
    step = stepped(model, optimizer)
    x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0), oc.Replicate()]) for t in batch())
    if not k_steps:
        step(x, y)
        return oc.record(step)(x, y)
    static = oc.to_static(step, k_steps=k_steps)
    static(x, y)
    return static.recording_of(x, y)


def by_hand() -> Recording:
    """Layers of fleet, cut over all ranks."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": oc.get_world_size(), "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    model = nn.Sequential(
        mp.ColumnParallelLinear(8, 12, gather_output=False),
        nn.Tanh(),
        mp.RowParallelLinear(12, 8, input_is_parallel=True),
    )
    step = stepped(model, torch.optim.AdamW(model.parameters(), 1e-2), clip=1e9)
    step(*batch())
    return oc.record(step)(*batch())


def pipeline(schedule: str = "") -> Recording:
    """A stack cut into stages; "": on one card, as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    step = stepped(model, torch.optim.AdamW(model.parameters(), 1e-2))
    if not schedule:
        step(*batch())
        return oc.record(step)(*batch())
    static = oc.to_static(step, stages=oc.Stages(4, schedule=schedule))
    for _ in range(2):
        static(*batch())
    return static.recordings[0]


def on_ranks(program: Callable[..., Recording], world: int, *args: Any, fake: bool = False) -> list[Recording]:
    """What each rank of a pretended world records."""
    recordings = []
    for rank in range(world):
        with oc.pretend(world, rank, fake=fake):
            recordings.append(program(*args))
    return recordings


def alone(program: Callable[..., Recording], *args: Any) -> Recording:
    with oc.pretend(1):
        return program(*args)
