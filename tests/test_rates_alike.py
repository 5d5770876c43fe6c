"""Ranks that step one optimizer with other numbers are told, where no copy of a parameter would show it; recordings, too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onecard as oc
from onecard import fleet
from onecard.testing import RankError, run_ranks
from onecard.train import rates

STAGES = (None, oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)


def marked(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, oc.ProcessMesh]:
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(np.arange(2), ["dp"])
    model = oc.shard_layer(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    kind = STAGES[stage]
    return model, oc.shard_optimizer(optimizer, kind("dp", mesh) if kind is not None else None), mesh


def by_marks(
    stage: int, options: dict[str, float], weights: int, recorded: bool = False, random: bool = False
) -> float:
    """Rank 1 has other ``options``, or writes other values, from call 10 on."""
    with oc.one_card_random() if random else nullcontext():
        return _by_marks(stage, options, weights, recorded)


def _by_marks(stage: int, options: dict[str, float], weights: int, recorded: bool) -> float:
    model, optimizer, mesh = marked(stage, lr=0.1)
    factors = torch.ones(4)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) * factors - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step) if recorded else step
    for call in range(34):
        if call == 10 and oc.get_rank() == 1:
            optimizer.param_groups[0].update(options)
            if weights == 1:
                with torch.no_grad():
                    model[0].bias.to_local().add_(1.0)
            elif weights == 2:
                factors.add_(1.0)
        x, y = torch.randn(4, 8), torch.randn(4, 4)
        if call >= 10 and oc.get_rank() == 1 and weights in (3, 4):
            x, y = (x + 1, y) if weights == 3 else (x, y + 1)
        x, y = (oc.shard_tensor(value, mesh, [oc.Shard(0)]) for value in (x, y))
        loss = run(x, y)
    return float(loss)


def by_fleet(kind: str, lr: float, at: int = -1) -> float:
    """Rank 1 has another rate: from the beginning, or at one step."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {kind if kind.endswith("degree") else "dp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    layers = fleet.meta_parallel
    model: Any = nn.Linear(8, 4)
    if kind == "mp_degree":  # no rank has a copy of anything
        model = layers.ColumnParallelLinear(8, 4, has_bias=False, gather_output=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr if oc.get_rank() and at < 0 else 0.1)
    if kind.endswith("degree"):
        model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    else:
        model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, kind)
    for step in range(9):
        if oc.get_rank() and at >= 0:
            optimizer.param_groups[0]["lr"] = lr if step == at else 0.1
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("options", [{"weight_decay": 0.5}, {"betas": (0.8, 0.999)}])
def test_ranks_that_divide_an_update_and_have_other_options_are_told(stage, options):
    field = next(iter(options))
    words = rf"AdamW.step at \S+py:\d+: '{field}' of group 0 is .* on rank 0 and .* on rank 1"
    inside = r"(lerp_|mul_) at \S+py:\d+: '\w+' is .* on rank 0 and .* on rank 1"  # operators are compared more often
    before = rf"out of step[\s\S]*AdamW.step with lr 0.1, .*{field}"  # messages carry it
    with pytest.raises(RankError, match=f"{words}|{inside}|{before}"):
        run_ranks(by_marks, 2, stage, options, 0)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", ["dp_degree", "mp_degree", "sharding_degree", "os", "p_g_os"])
def test_ranks_of_a_fleet_that_have_other_rates_are_told(kind):
    with pytest.raises(RankError, match=r"'lr' of group 0 is 0.1 on rank 0 and 0.2 on rank 1"):
        run_ranks(by_fleet, 2, kind, 0.2)
    run_ranks(by_fleet, 2, kind, 0.1 * (1 + 1e-9))  # as another processor may round it


@pytest.mark.parametrize("kind", ["sharding_degree", "os", "os_g", "p_g_os"])
def test_a_rate_of_one_step_alone_is_told_with_the_next_message(kind):
    with pytest.raises(RankError, match=r"AdamW.step with lr 0.1, [\s\S]*AdamW.step with lr 0.2, "):
        run_ranks(by_fleet, 2, kind, 0.2, 5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_recording_whose_ranks_have_other_rates_is_told_when_it_is_compared(stage):
    with pytest.raises(RankError, match=r"'lr' of group 0 is 0.1 on rank 0 and 0.4 on rank 1"):
        run_ranks(by_marks, 2, stage, {"lr": 0.4}, 0, True)
    run_ranks(by_marks, 2, stage, {}, 0, True)


@pytest.mark.parametrize(
    ("weights", "said"),
    [(1, r"parameter 0.bias.* promises equal copies"), (2, r"'other' \[4\] .* counts as Replicate")],
)
def test_what_ranks_have_otherwise_in_a_recorded_step_is_told_when_it_is_compared(weights, said):
    with pytest.raises(RankError, match=said):
        run_ranks(by_marks, 2, 0, {}, weights, True)


@pytest.mark.share(3)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("weights", [1, 2, 3, 4])
def test_the_same_where_numbers_are_drawn_as_on_one_card(weights, recorded):
    """Also inputs and labels of one shape, of which each was compared at all of its calls or at none."""
    words = r"promises equal copies|counts as Replicate, but it differs between ranks"
    with pytest.raises(RankError, match=words):
        run_ranks(by_marks, 2, 0, {}, weights, recorded, random=True)
    if weights > 2:
        with pytest.raises(RankError, match=words):
            run_ranks(by_marks, 2, 0, {}, weights, recorded)


def test_what_is_no_number_is_not_compared_and_numbers_may_be_rounded_otherwise():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [a], "name": "a"}, {"params": [b], "lr": torch.tensor(0.3), "betas": (0.8, 0.9)}]
    said = rates._said(torch.optim.AdamW(groups, lr=0.1))
    assert said[0]["lr"] == 0.1 and said[1]["lr"] == pytest.approx(0.3) and said[1]["betas"] == [0.8, 0.9]
    assert "name" not in said[0] and "foreach" not in said[0]
    assert rates._difference(said, [said[0], {**said[1], "betas": [0.8, 0.9 + 1e-9]}]) is None
    assert rates._difference(said, [said[0], {**said[1], "betas": [0.8, 0.95]}]) == (
        1,
        "betas",
        [0.8, 0.9],
        [0.8, 0.95],
    )
    assert rates._difference([{"lr": float("nan")}], [{"lr": float("nan")}]) is None
