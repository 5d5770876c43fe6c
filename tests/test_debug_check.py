"""No false alarm of the debug check (ONECARD_CHECK=1) where a rank has nothing: found by random programs under it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.comm.issue import collectives
from onecard.comm.issue.groups import group
from onecard.errors import CommunicationError
from onecard.testing import run_ranks


def lines_without_elements() -> None:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    whole = torch.arange(12.0).view(1, 4, 3)
    ways = [oc.Shard(0), oc.Shard(1), oc.Shard(2), oc.Replicate(), oc.Partial()]
    for placements in itertools.product(ways, ways):
        x = oc.reshard(oc.shard_tensor(whole, mesh, [oc.Replicate()] * 2), mesh, placements)
        assert torch.equal(x.full_tensor(), whole)  # where x is cut along dim 0, one line along y has nothing to send
        # What was said of a message that was not sent is not of the next one, of which nothing is said.
        assert collectives.all_reduce(torch.ones(1), group(mesh, 0)).item() == 2
        assert torch.equal((x * 2).sum(0).full_tensor(), 2 * whole[0])


def taken_apart_where_a_part_is_empty() -> None:
    mesh = oc.ProcessMesh([2, 0, 3, 1], ["x"])
    cut, copied = (oc.shard_tensor(torch.ones(2), mesh, [p]) for p in (oc.Shard(0), oc.Replicate()))
    norms = torch._foreach_norm([cut, copied])
    assert [round(n.full_tensor().item() ** 2) for n in norms] == [2, 2]
    for p in (parameters := [nn.Parameter(cut), nn.Parameter(copied)]):
        p.grad = p.detach().clone()
    assert nn.utils.clip_grad_norm_(parameters, 0.1).item() == pytest.approx(2.0)


def still_sees_a_branch() -> None:
    mesh = oc.ProcessMesh([0, 1, 2, 3], ["x"])
    x, y = (oc.shard_tensor(torch.ones(8), mesh, [oc.Replicate()]) for _ in range(2))
    with pytest.raises(CommunicationError, match="out of step"):
        torch._foreach_norm([x, y] if oc.get_rank() else [x])


@pytest.mark.proof
def test_ranks_that_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_CHECK", "1")
    run_ranks(lines_without_elements, 4)
    run_ranks(taken_apart_where_a_part_is_empty, 4)
    run_ranks(still_sees_a_branch, 4)


def a_plan_of_stages_beside_dp() -> None:
    """Its step is written down first without values, of which there is nothing to compare."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    opt = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    whole = oc.Plan(pp=2, dp=2, microbatches=2, per_host=0, parameters="float32", compute="float32")
    run, x = oc.to_static(step, plan=whole), torch.arange(16.0).view(4, 4) / 16
    first, second = float(run(x)), float(run(x))
    assert second < first


@pytest.mark.proof
def test_a_step_that_is_written_down_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_CHECK", "1")
    run_ranks(a_plan_of_stages_beside_dp, 4)
