"""A fleet program without devices: what a pretended rank without data sends, and records, is what a real one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

mp = fleet.meta_parallel
WAYS: tuple[dict[str, int], ...] = ({"dp_degree": 2, "mp_degree": 2}, {"dp_degree": 1, "sharding_degree": 4}, {})


def of(degrees: dict[str, int]) -> list[Any]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(strategy=strategy)
    torch.manual_seed(0)
    up = mp.ColumnParallelLinear(4, 6, gather_output=False, has_bias=True)
    net = nn.Sequential(nn.LayerNorm(4), up, mp.RowParallelLinear(6, 4, input_is_parallel=True))
    if degrees:
        model: Any = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters()))
    else:
        model, optimizer, _ = fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters()), "os_g")

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        fleet.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with oc.explain() as report:
        step(torch.randn(3, 4))
    recorded = oc.record(step)(torch.randn(3, 4))
    return [*((m.step.kind, m.operator, m.step.bytes) for m in report.messages), recorded.cost().sent]


def real() -> list[Any]:
    return [of(degrees) for degrees in WAYS]


@pytest.mark.proof
def test_a_pretended_rank_sends_and_records_what_a_real_one_does() -> None:
    ranks = run_ranks(real, 4)
    for number, degrees in enumerate(WAYS):
        with oc.pretend(4, 1, fake=True):
            assert of(degrees) == ranks[1][number], degrees


@pytest.mark.parametrize("level", ["", "os", "os_g", "p_g_os"])
def test_embeddings_that_bound_the_rows_of_a_ranks_own_ids_are_refused(level: str) -> None:
    """Each rank would bound others of its copy's rows; alone, and without a bound, they are any layers."""

    def made(max_norm: float | None) -> None:
        fleet.init(is_collective=True)
        net = nn.Sequential(nn.Embedding(8, 4, max_norm=max_norm), nn.Linear(4, 4))
        if level:
            fleet.group_sharded_parallel(net, torch.optim.SGD(net.parameters(), 0.1), level)
        else:
            fleet.distributed_model(net)

    with oc.pretend(2, 1, fake=True):
        made(None)
        with pytest.raises(
            fleet.FleetError, match=r"0 is an Embedding with max_norm=1.0.*bound all rows behind each step"
        ):
            made(1.0)
    with oc.pretend(1, 0, fake=True):
        made(1.0)
