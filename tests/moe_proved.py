"""Mixtures by marks and by hand, to be proved: right as they are, wrong with a fault."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from router_programs import Mixture, Routed
from torch import nn

import onecard as oc
from onecard import fleet


def by_marks(fault: str = "") -> list[float]:
    """Experts along ep, tokens too; losses of a router without padding."""
    torch.manual_seed(0)
    ranks = oc.get_world_size()
    model = Mixture(Routed(jitter=0.0, fault=fault if ranks > 1 else ""))
    mesh = oc.ProcessMesh(range(ranks), ["ep"])

    def place(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(module, Mixture):
            module.up = oc.shard_tensor(module.up, mesh, [oc.Shard(0)])
            module.down = oc.shard_tensor(module.down, mesh, [oc.Shard(0)])

    oc.shard_layer(model, mesh, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        x, valid = torch.randn(4, 6, 16), torch.rand(4, 6) > 0.3
        x, valid = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, valid))
        loss = model(x, valid).square().mean() + model.router.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand(fault: str = "") -> Any:
    """``MoELayer`` with experts along ep, and a loss of its router."""
    ranks = oc.get_world_size()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": ranks, "ep_degree": ranks}
    fleet.init(is_collective=True, strategy=strategy)
    oc.manual_seed(0)
    torch.manual_seed(0)
    experts = fleet.meta_parallel.GroupedExperts(8, 16, 32)
    gate = {"type": "topk", "top_k": 2, "balance_loss": 0.5, "z_loss": 0.1}
    moe = fleet.meta_parallel.MoELayer(16, experts, gate)
    model = fleet.distributed_model(nn.Sequential(moe, nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.distributed_optimizer(optimizer)
    mine = slice(8 // ranks * oc.get_rank(), 8 // ranks * (oc.get_rank() + 1))
    for _ in range(2):
        x, labels = torch.randn(8, 5, 16), torch.randint(4, (8, 5))
        loss = F.cross_entropy(model(x[mine]).flatten(0, 1), labels[mine].flatten())
        lost = fleet.router_loss(model)
        if fault == "the balance loss of each rank" and ranks > 1:
            lost = lost * ranks
        (loss + lost).backward()
        optimizer.step()
        optimizer.zero_grad()
