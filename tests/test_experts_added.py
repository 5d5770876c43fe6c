"""What experts that are modules have beside the weights that the layer was made with: adapters, masks, copies of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

STEPS, LEVELS = 3, ("dp", "os", "os_g", "p_g_os")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    """With parameters that begin alike in all experts, and a buffer that does not."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.ones(base.out_features))
        self.register_buffer("mask", (base.weight.detach()[:, 0] > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale * (1 + self.mask)


def adapters(expert: Any) -> None:
    expert.up = Scaled(expert.up)


def normed(expert: Any) -> None:
    parametrizations.weight_norm(expert.down)


def pruned(expert: Any) -> None:
    prune.l1_unstructured(expert.up, "weight", 0.5)


ADDED = {"adapters": adapters, "normed": normed, "pruned": pruned}


def network(added: str, after: bool = False) -> Any:
    oc.manual_seed(0)
    experts = [fleet.LayerDesc(Expert) for _ in range(4)]
    net = nn.Sequential(fleet.meta_parallel.MoELayer(8, experts, {"type": "topk", "top_k": 2}), nn.Linear(8, 4))
    for module in net.modules():
        if isinstance(module, Expert) and added and not after:
            ADDED[added](module)
    return net


def began() -> int:
    ranks = oc.get_world_size()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": ranks, "ep_degree": min(ranks, 2)}
    fleet.init(strategy=strategy)
    return ranks


def wrapped(net: Any, level: str) -> tuple[Any, Any]:
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9)
    if oc.get_world_size() == 1:
        return net, optimizer
    if level == "dp":
        return fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)
    return fleet.group_sharded_parallel(net, optimizer, level)[:2]


def losses(model: Any, optimizer: Any, steps: int = STEPS) -> list[float]:
    ranks, found = oc.get_world_size(), []
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, y = torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)
        loss = F.cross_entropy(model(x.chunk(ranks)[oc.get_rank()]), y.chunk(ranks)[oc.get_rank()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(oc.all_reduce(loss.detach().clone(), oc.ReduceOp.AVG).wait()))
    return found


def trained(added: str, level: str) -> list[float]:
    began()
    return losses(*wrapped(network(added), level))


def added_later(added: str) -> list[float]:
    """By plain data parallelism a model may change between steps."""
    began()
    net = network("")
    model, optimizer = wrapped(net, "dp")
    before = losses(model, optimizer, 1)
    for module in net.modules():
        if isinstance(module, Expert):
            ADDED[added](module)
    _, optimizer = (None, torch.optim.SGD(net.parameters(), 0.3))
    return before + losses(model, optimizer)


def copied(level: str) -> list[float]:
    """A copy, as an average of weights or a teacher is, before and while it is trained."""
    began()
    model, optimizer = wrapped(network("adapters"), level)
    losses(model, optimizer, 1)
    made = copy.deepcopy(model)
    return losses(made, torch.optim.SGD(made.parameters(), 0.3))


def all_of() -> dict[str, list[float]]:
    found = {f"{added} {level}": trained(added, level) for added in ADDED for level in LEVELS}
    found |= {f"{added} later": added_later(added) for added in ADDED}
    return found | {f"a copy {level}": copied(level) for level in LEVELS}


@pytest.fixture(scope="module")
def one_card() -> dict[str, list[float]]:
    return run_ranks(all_of, 1)[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_what_experts_have_beside_their_weights(ranks: int, one_card: dict[str, list[float]]) -> None:
    found = run_ranks(all_of, ranks)[0]
    assert found.keys() == one_card.keys()
    for name, values in found.items():
        assert values == pytest.approx(one_card[name], rel=2e-5), name
