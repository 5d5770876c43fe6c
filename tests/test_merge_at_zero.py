"""Gradient merge of recorded steps (``k_steps``) at every level of ZeRO: counts of the batch, and the comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

MARKS, HAND = ("stage 2", "blocks"), ("os", "os_g", "p_g_os")
CALLS = 4  # the third is compared


def ignoring(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.where(y < 2, -100, y))


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=torch.linspace(0.5, 2.0, 7))


def masked(logits: Tensor, y: Tensor) -> Tensor:
    wanted = (y > 2).float()
    return (F.cross_entropy(logits, y, reduction="none") * wanted).sum() / wanted.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ignoring": ignoring, "weighted": weighted, "masked": masked}


def _batch(i: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    return torch.randn(16, 5, generator=made), torch.randint(7, (16,), generator=made)


def _trained(level: str, loss_of: Callable[[Tensor, Tensor], Tensor], width: int) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 7))
    mesh: Any = None
    if level in HAND:
        made: Any = torch.optim.AdamW(net.parameters(), 0.05)
        net, made, _ = fleet.group_sharded_parallel(net, made, level)
    elif level:
        mesh = oc.ProcessMesh([*range(oc.get_world_size())], ["dp"])
        oc.shard_layer(net, mesh)
        stages = {"stage 1": oc.ShardingStage1, "stage 2": oc.ShardingStage2, "stage 3": oc.ShardingStage3}
        made = torch.optim.AdamW(net.parameters(), 0.05)
        blocks = oc.ShardingStage3("dp", mesh, model=net) if level == "blocks" else None
        made = oc.shard_optimizer(made, stages[level]("dp", mesh) if level in stages else blocks)
    else:
        made = torch.optim.AdamW(net.parameters(), 0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        made.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        made.step()
        return loss.detach()

    run, seen = oc.to_static(step, k_steps=2) if level else step, []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(CALLS):
            x, y = _batch(i)
            if mesh is not None:
                x, y = (oc.shard_tensor(v, mesh, [oc.Shard(0)]) for v in (x, y))
            elif level:
                x, y = (v.chunk(oc.get_world_size())[oc.get_rank()] for v in (x, y))
            found = oc.unshard(run(x, y)).clone()
            if level and mesh is None:
                oc.all_reduce(found, oc.ReduceOp.AVG)
            seen.append(found.item())
    return seen, [str(each.message) for each in told]


CASES = [
    *((level, "ignoring", 6) for level in MARKS), ("stage 3", "ignoring", 128),
    *(("stage 3", loss, 6) for loss in LOSSES), *((level, "plain", 6) for level in HAND),
]  # fmt: skip
"""By a level of the manual kind each rank has a loss of its own, whose mean is one card's where all labels count."""


@pytest.mark.share(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_are_the_batchs_and_nothing_is_told(case: tuple[str, str, int]) -> None:
    """A small stage 3 gathers its rows, labels too; a large one its weights."""
    level, loss, width = case
    loss_of = LOSSES.get(loss, F.cross_entropy)
    wanted = _trained("", loss_of, width)[0]
    found, told = run_ranks(_trained, 2, level, loss_of, width, timeout=120.0)[0]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert not told, told
