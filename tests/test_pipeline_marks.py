"""Stages by marks under a schedule: one card's numbers, in the schedule's order; what cannot be so is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from test_examples_seeds import load
from torch import Tensor, nn

import onecard as oc
from onecard import pipeline
from onecard.errors import ScheduleError
from onecard.testing import run_ranks


class Net(nn.Module):
    """Parts on meshes, with a value that skips one; no meshes: one card."""

    def __init__(self, meshes: list[oc.ProcessMesh], parts: int) -> None:
        super().__init__()
        self.meshes, self.events = meshes, list[str]()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(parts))
        for part, mesh in zip(self.parts, meshes, strict=False):
            oc.shard_layer(part, mesh)

    def forward(self, x: Tensor) -> Tensor:
        self.events.append("F")
        batch = oc.Shard(0) if self.meshes and self.meshes[0].size > 1 else oc.Replicate()
        skip: Tensor | None = None
        for i, part in enumerate(self.parts):
            if self.meshes:
                x = oc.reshard(x, self.meshes[i], [batch])
                skip = oc.reshard(skip, self.meshes[i], [batch]) if skip is not None else None
            x = part(x)
            skip = x if skip is None else skip
        x = x + (skip if skip is not None else 0)
        if x.requires_grad:
            x.register_hook(lambda grad: self.events.append("B"))
        return x


def marked(size: int) -> None:
    stages = oc.get_world_size() // size
    meshes = [oc.ProcessMesh(range(size * i, size * (i + 1)), ["dp"]) for i in range(stages)]
    mine = oc.get_rank() // size
    for mode in ("naive", "F-then-B", "1F1B", "Eager1F1B", pipeline.one_f_one_b):
        for m in (1, 3, 4):
            torch.manual_seed(0)
            single = Net([], stages)
            torch.manual_seed(0)
            net = Net(meshes, stages)
            x, y = torch.randn(7 * size, 6), torch.randn(7 * size, 6)
            expected = F.mse_loss(single(x), y)
            expected.backward()
            loss = pipeline.step_by_marks(net, F.mse_loss, x, y, schedule=mode, microbatches=m)
            close(oc.unshard(loss), expected.detach(), f"{mode}, {m}: loss")
            for (name, p), q in zip(net.named_parameters(), single.parameters(), strict=True):
                close(oc.unshard(p.grad), q.grad, f"{mode}, {m}: gradient of {name}")
            order = pipeline.modes.plan(mode, stages)(m).compute().ranks[mine]
            if mine == stages - 1:  # where the hook has something to do
                assert net.events == [action.kind for action in order], (mode, net.events)


@pytest.mark.parametrize(("ranks", "size", "backend"), [(2, 1, None), (4, 1, None), (4, 2, None), (2, 1, "gloo")])
def test_stages_by_marks_are_one_card_under_every_order(ranks: int, size: int, backend: str | None) -> None:
    run_ranks(marked, ranks, size, backend=backend)


def large_messages() -> None:
    """Both ranks send each other at once more than any buffer holds."""
    meshes = [oc.ProcessMesh([i], ["pp"]) for i in range(2)]
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(2, 600_000), nn.Linear(600_000, 1))
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    expected = F.mse_loss(parts(x), y).item()
    for part, mesh in zip(parts, meshes, strict=True):
        oc.shard_layer(part, mesh)
        part.register_forward_pre_hook(lambda _, args, mesh=mesh: (oc.reshard(args[0], mesh, [oc.Replicate()]),))
    loss = pipeline.step_by_marks(parts, F.mse_loss, x, y, "1F1B", 4)
    assert oc.unshard(loss).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_large_messages_by_marks_do_not_wait_in_a_circle(backend: str | None) -> None:
    run_ranks(large_messages, 2, backend=backend, timeout=30)


def seed_003() -> list[float]:
    """The seed's net by marks; of its loop one call is another."""
    program = load("semi_auto_pipeline_parallel_003")
    torch.manual_seed(0)
    net = program.SimpleNet(256, 64, 10)
    stages = [program.world_process_mesh[i] for i in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        x = torch.rand(8, 256, generator=torch.Generator().manual_seed(step))
        y = torch.arange(8) % 10
        if oc.get_world_size() > 1:
            loss = pipeline.step_by_marks(net, F.cross_entropy, x, y, "1F1B", 4, stages=stages)
        else:
            loss = F.cross_entropy(nn.Sequential(net.linear1, net.linear2, net.linear3, net.relu)(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(oc.unshard(loss.detach()).item())
    return losses


def test_the_seeds_net_by_marks_under_1f1b() -> None:
    torch.manual_seed(0)
    expected = run_ranks(seed_003, 1)[0]
    for losses in run_ranks(seed_003, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def refused() -> None:
    meshes = [oc.ProcessMesh([i], ["dp"]) for i in range(2)]
    net, x = Net(meshes, 2), torch.randn(4, 6)

    def said(**more: object) -> str:
        with pytest.raises(ScheduleError) as caught:
            pipeline.step_by_marks(**{"model": net, "loss_fn": F.mse_loss, "inputs": x, "targets": x} | more)  # type: ignore[arg-type]
        return str(caught.value)

    assert "ZB-H1 halves backwards" in said(schedule="ZBH1")
    assert "is for 2 ranks and 4 stages" in said(schedule="VPP")
    assert "is in the meshes of stages [0, 1]" in said(stages=[oc.ProcessMesh([0, 1], ["dp"])] * 2)
    assert "lie on 0 mesh(es)" in said(model=nn.Linear(6, 6))
    assert "a batch of 4 does not make 5 microbatches" in said(microbatches=5)
    assert "want one of 1F1B" in said(schedule="1B1F")


def test_what_cannot_run_by_marks_is_refused() -> None:
    run_ranks(refused, 2)
