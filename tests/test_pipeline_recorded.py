"""Recorded graphs as stages: a step under a schedule is recorded on each rank, cut where the mesh changes, and replayed."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from torch import Tensor, nn

import onecard as oc
from onecard import pipeline
from onecard.testing import run_ranks


class Net(nn.Module):
    """Two stages, and a value of the first that the second needs, too; no meshes: one card."""

    def __init__(self, meshes: list[oc.ProcessMesh], wide: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meshes = meshes
        self.first, self.second = nn.Linear(6, wide), nn.Linear(wide, 6)
        for part, mesh in zip((self.first, self.second), meshes, strict=False):
            oc.shard_layer(part, mesh)

    def forward(self, x: Tensor) -> Tensor:
        x = self._on(x, 0)
        y = torch.tanh(self.first(x))
        return self.second(self._on(y, 1)) + self._on(x, 1)

    def _on(self, x: Tensor, stage: int) -> Tensor:
        return oc.reshard(x, self.meshes[stage], [oc.Shard(0)]) if self.meshes else x


def program(meshes: list[oc.ProcessMesh], wide: int, mode: Any, microbatches: int) -> tuple[Any, Any]:
    """A net and its step: on one card the plain one."""
    net = Net(meshes, wide)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    if meshes:
        oc.shard_optimizer(optimizer, oc.ShardingStage1("dp") if meshes[0].size > 1 else None)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if meshes:
            loss = pipeline.step_by_marks(net, F.mse_loss, x, y, mode, microbatches)
        else:
            loss = F.mse_loss(net(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return net, step


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def recorded(size: int, wide: int, mode: Any, microbatches: int, samples: int) -> None:
    meshes = [oc.ProcessMesh(range(size * i, size * (i + 1)), ["dp"]) for i in range(2)]
    single, plain = program([], wide, mode, 1)
    eager, eager_step = program(meshes, wide, mode, microbatches)
    net, step = program(meshes, wide, mode, microbatches)
    static = oc.to_static(step)
    for number in range(4):
        x, y = batch(number, samples)
        expected, other, loss = plain(x, y), eager_step(x, y), static(x, y)
        close(oc.unshard(loss), expected, f"{mode}: loss of step {number}", 1e-4)
        assert torch.equal(oc.unshard(loss), oc.unshard(other)), f"{mode}: a replay is not the eager step"
    for p, q, r in zip(net.parameters(), eager.parameters(), single.parameters(), strict=True):
        assert torch.equal(oc.unshard(p.detach()), oc.unshard(q.detach()))
        close(oc.unshard(p.detach()), r.detach(), f"{mode}: parameters", 1e-4 if wide < 1000 else 2e-3)
    assert len(static.recordings) == 1, "it was recorded again"
    moves = [n for n in static.recordings[0].nodes() if "transfer" in str(n.target)]
    mine = oc.get_rank() // size
    assert len(moves) == 3 * microbatches, (mine, len(moves))  # y and x to the second, a gradient back, each time


def on_two_ranks() -> None:
    for mode in ("naive", "F-then-B", "1F1B", "Eager1F1B"):
        recorded(1, 8, mode, 3, 7)
    recorded(1, 600_000, "1F1B", 4, 8)  # more than any buffer holds, both ways at once


def on_four_ranks() -> None:
    recorded(2, 8, "1F1B", 4, 16)


@pytest.mark.proof
def test_a_recorded_step_under_a_schedule() -> None:
    run_ranks(on_two_ranks, 2)


@pytest.mark.proof
def test_a_recorded_step_under_a_schedule_with_data_parallel_stages() -> None:
    run_ranks(on_four_ranks, 4)


def with_rows_kept_aside() -> None:
    """A batch that is given again, of which somebody keeps rows: copies that stand for views know what they were taken from."""
    meshes = [oc.ProcessMesh([rank], ["dp"]) for rank in range(2)]
    net, _ = program(meshes, 8, "1F1B", 2)
    twin = Net([], 8)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3) for module in (net, twin)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizers[0].zero_grad()
        loss = pipeline.step_by_marks(net, F.mse_loss, x, y, "1F1B", 2)
        optimizers[0].step()
        return loss.detach()

    static = oc.to_static(step)
    whole = [batch(number, 8) for number in range(3)]
    batches = [[oc.shard_tensor(t, m, [oc.Shard(0)]) for t, m in zip(pair, meshes, strict=True)] for pair in whole]
    gc.collect()  # batches are older than what is taken from them
    for number in range(6):
        x, y = batches[number % 3]
        kept = x.split(4), copy.copy(y)
        loss = static(x, y)
        del kept
        optimizers[1].zero_grad()
        expected = F.mse_loss(twin(whole[number % 3][0]), whole[number % 3][1])
        expected.backward()
        optimizers[1].step()
        close(oc.unshard(loss), expected.detach(), f"loss of step {number}", 1e-5)
    assert len(static.recordings) == 1, "it was recorded again"


def test_rows_of_a_batch_are_no_inputs_of_their_own() -> None:
    run_ranks(with_rows_kept_aside, 2)
