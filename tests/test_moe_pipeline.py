"""Mixtures of experts in the stages of a pipeline: losses of routers are counted once, whichever stage they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import share
from fleet_programs import close
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

mp = fleet.meta_parallel
BALANCED = {"type": "topk", "top_k": 2, "balance_loss": 0.3, "z_loss": 0.05, "capacity": 1.0}


class Block(nn.Module):
    def __init__(self, gate: dict[str, Any] | None) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        experts = [fleet.LayerDesc(nn.Linear, 6, 6) for _ in range(4)]
        self.moe = None if gate is None else mp.MoELayer(6, experts, gate)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        return h if self.moe is None else h + self.moe(h)


def losing(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (8, 5), generator=g)
    y[torch.rand(8, 5, generator=g) < 0.3] = -100
    return torch.randn(8, 5, 6, generator=g), y


def train(degrees: dict[str, int], gate: dict[str, Any], mode: str, again: int, clip: float = 0.2) -> dict[str, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in degrees.items()}
    data = degrees.get("dp", 1)
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2 // data, "schedule_mode": mode}
    fleet.init(strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    oc.manual_seed(1)
    gates = [gate, None, gate, gate]
    chunks = 2 if mode in ("ZBV", "VPP") and degrees.get("pp", 1) > 1 else None
    pipe = fleet.PipelineLayer(
        [fleet.LayerDesc(Block, g) for g in gates], loss_fn=losing, recompute_interval=again,
        num_virtual_pipeline_stages=chunks,
    )  # fmt: skip
    model = fleet.distributed_model(pipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    fleet.distributed_optimizer(optimizer, grad_clip=fleet.ClipGradByGlobalNorm(clip))
    made: dict[str, Any] = {"losses": []}
    for step in range(5):
        x, y = batch(step)
        at = hcg.get_data_parallel_rank()
        mine = [t.unflatten(0, (4, 2)).chunk(data, 1)[at].flatten(0, 1).contiguous() for t in (x, y)]
        made["losses"].append(float(model.train_batch(mine, optimizer)))
    return made | {name: p.detach().clone() for name, p in pipe.named_parameters()}


def plainly(gate: dict[str, Any]) -> dict[str, Any]:
    """The same on one card, its microbatches one after the other."""
    fleet.init()
    oc.manual_seed(1)
    net = nn.Sequential(*[Block(g) for g in (gate, None, gate, gate)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-3)
    made: dict[str, Any] = {"losses": []}
    for step in range(5):
        x, y = batch(step)
        counted, total = (y != -100).sum(), 0.0
        for part, labels in zip(x.split(2), y.split(2), strict=True):
            loss = losing(net(part), labels) * (labels != -100).sum() / counted + fleet.router_loss(net) / 4
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        made["losses"].append(total)
    return made | {name: p.detach().clone() for name, p in net.named_parameters()}


CASES = [
    ({"pp": 2}, BALANCED, "1F1B", 0),
    ({"pp": 2, "dp": 2, "ep": 2}, BALANCED, "1F1B", 0),
    ({"pp": 2, "dp": 2, "ep": 2}, BALANCED, "F-then-B", 1),
    ({"pp": 2, "dp": 2}, {"type": "gshard", "loss_weight": 0.1, "random_routing": False}, "1F1B", 0),
    ({"pp": 2, "dp": 2, "ep": 2}, {"type": "switch", "loss_weight": 0.1, "switch_eps": 0.0}, "ZBV", 0),
    ({"pp": 4}, BALANCED, "ZBH1", 0),
]


@pytest.mark.parametrize("case", share(CASES, 1), ids=str)
def test_a_pipeline_of_mixtures_is_one_cards(case: tuple[dict[str, int], dict[str, Any], str, int]) -> None:
    degrees, gate, mode, again = case
    ranks = degrees.get("pp", 1) * degrees.get("dp", 1)
    single = run_ranks(plainly, 1, gate)[0]
    for mine in run_ranks(train, ranks, *case):
        if degrees.get("dp", 1) == 1:  # else each rank has the mean over its labels alone
            close(torch.tensor(mine["losses"]), torch.tensor(single["losses"]), "losses")
        for name, value in mine.items():
            if name != "losses" and degrees.get("dp", 1) == 1:
                close(value, single[name], name)
    if degrees.get("dp", 1) > 1:
        together(degrees, gate, mode, again, ranks)


def together(degrees: dict[str, int], gate: dict[str, Any], mode: str, again: int, ranks: int) -> None:
    """Labels that are ignored weigh differently on each rank of dp, on one card's stages, too: there the pipeline is the twin."""
    same = {axis: n for axis, n in degrees.items() if axis == "dp"}
    single = run_ranks(train, degrees["dp"], same, gate, "1F1B", 0)[0]
    for mine in run_ranks(train, ranks, degrees, gate, mode, again):
        for name, value in mine.items():
            if name != "losses":
                close(value, single[name], name)
