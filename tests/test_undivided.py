"""Marks with a loader that nobody divided: every rank does all of the work, and is told so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.auto.rank import Job, begin
from onecard.testing import run_ranks

STAGES: dict[str, Any] = {"plain": None, "ZeRO-1": oc.ShardingStage1("dp"), "ZeRO-2": oc.ShardingStage2("dp")}


def _told(stage: str, divides: bool, tp: bool = False) -> list[str]:
    mesh = oc.ProcessMesh([[0], [1]] if not tp else [[0, 1]], ["dp", "tp"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = nn.Linear(4, 2)

        def shard(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
            if tp:
                layer.weight = nn.Parameter(oc.shard_tensor(layer.weight, mesh, [oc.Replicate(), oc.Shard(1)]))

        oc.shard_layer(net, mesh, shard)
        optimizer = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1), STAGES[stage])
        loader: Any = torch.utils.data.DataLoader(torch.ones(8, 4), 4)
        for x in oc.shard_dataloader(loader, mesh, shard_dims="dp") if divides else loader:
            net(x).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in seen if "nothing is divided" in str(w.message)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_batch_on_each_rank_is_told_once(stage):
    for said in run_ranks(_told, 2, stage, False):
        assert len(said) == 1 and "'dp': each of its 2 ranks" in said[0] and "test_undivided.py" in said[0]
        assert "onecard.shard_dataloader(loader, mesh, shard_dims='dp')" in said[0]


@pytest.mark.share(1)
@pytest.mark.parametrize(("stage", "tp"), [*((stage, False) for stage in STAGES), ("plain", True)])
def test_divided_work_is_not(stage, tp):
    """By rows, or by a weight alone, which takes the whole batch."""
    assert run_ranks(_told, 2, stage, not tp, tp) == [[], []]


def _of_gradients_by_hand() -> list[str]:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = nn.Linear(4, 2)
        oc.shard_layer(net, mesh)
        optimizer = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        for p in net.parameters():
            p.grad = oc.from_local(torch.full(p.shape, oc.get_rank() + 1.0), mesh, [oc.Partial()])
        optimizer.step()
    return [str(w.message) for w in seen if "nothing is divided" in str(w.message)]


def test_gradients_that_a_program_makes_of_what_ranks_have():
    assert run_ranks(_of_gradients_by_hand, 2) == [[], []]


def _of_fleet() -> list[str]:
    from onecard import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"sharding_degree": 2}
    fleet.init(strategy=strategy)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = fleet.distributed_model(nn.Linear(4, 2))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # sums gradients, which are pending no longer
            optimizer.step()
            optimizer.clear_grad()
    return [str(w.message) for w in seen if "nothing is divided" in str(w.message)]


def test_ranks_of_fleet_read_other_data():
    assert run_ranks(_of_fleet, 2) == [[], []]


def _as_one_card(rows: int) -> list[str]:
    begin(Job(oc.Plan(dp=2, per_host=0)).to_json())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            net(torch.ones(rows, 4)).sum().backward()
            optimizer.step()
    return [str(w.message) for w in seen if "nothing is divided" in str(w.message)]


@pytest.mark.share(1)
@pytest.mark.parametrize("rows", [1, 2])
def test_programs_for_one_card_are_told_of_too_few_rows(rows):
    for said in run_ranks(_as_one_card, 2, rows):
        assert len(said) == (rows < 2) and all("take larger batches" in words for words in said)
