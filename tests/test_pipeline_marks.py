"""Stages by marks under a schedule: one card's numbers, in the schedule's order; what cannot be so is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from test_examples_seeds import load
from torch import Tensor, nn

import onecard as oc
from onecard import pipeline
from onecard.errors import ScheduleError
from onecard.pipeline.schedule import check, modes
from onecard.pipeline.schedule.schedule_messages import one_order
from onecard.testing import assert_close, multirank, run_ranks


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


def backwards(ranks: int, microbatches: int) -> pipeline.Schedule:
    """GPipe, whose last rank takes the microbatches in the other order."""
    rows = [list(row) for row in pipeline.gpipe(ranks, microbatches).compute().ranks]
    rows[-1] = [pipeline.Action(kind, stage, microbatches - 1 - i) for kind, stage, i in rows[-1]]
    return pipeline.with_messages(pipeline.Schedule.of(rows, "backwards"))


def marked(size: int) -> None:
    stages = oc.get_world_size() // size
    meshes = [oc.ProcessMesh(range(size * i, size * (i + 1)), ["dp"]) for i in range(stages)]
    mine = oc.get_rank() // size
    for mode in ("naive", "F-then-B", "1F1B", "Eager1F1B", pipeline.one_f_one_b, "ZBH1", "ZB2P", backwards):
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
            order = modes.plan(mode, stages)(m).compute().ranks[mine]
            if mine == stages - 1:  # where the hook has something to do
                kinds = ["B" if action.kind == "I" else action.kind for action in order if action.kind != "W"]
                assert net.events == kinds, (mode, net.events)


@pytest.mark.proof
@pytest.mark.share(2)
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


@pytest.mark.share(2)
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_large_messages_by_marks_do_not_wait_in_a_circle(backend: str | None) -> None:
    run_ranks(large_messages, 2, backend=backend)


def seed_003(lists: bool = False) -> list[float]:
    """The seed's net by marks; of its loop one call is another. ``lists``: with operators on lists, as torch chooses on GPUs."""
    program = load("semi_auto_pipeline_parallel_003")
    torch.manual_seed(0)
    net = program.SimpleNet(256, 64, 10)
    stages = [program.world_process_mesh[i] for i in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=lists)
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


@pytest.mark.share(1)
@pytest.mark.parametrize("lists", [False, True])
def test_the_seeds_net_by_marks_under_1f1b(lists: bool) -> None:
    torch.manual_seed(0)
    expected = run_ranks(seed_003, 1)[0]
    for losses in run_ranks(seed_003, 2, lists):
        assert losses == pytest.approx(expected, rel=1e-5)


class Tied(nn.Module):
    """A weight of the first stage that the last one uses, too, a value that skips stages at once, and a frozen one."""

    def __init__(self, meshes: list[oc.ProcessMesh]) -> None:
        super().__init__()
        self.meshes = meshes
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.parts[2].requires_grad_(False)
        for part, mesh in zip(self.parts, meshes, strict=False):
            oc.shard_layer(part, mesh)

    def forward(self, x: Tensor) -> Tensor:
        first = self.parts[0](self._on(x, 0)).tanh()
        x = first
        for i in (1, 2, 3):
            x = self.parts[i](self._on(x, i)).tanh_()
        return F.linear(x + self._on(first, 3), self._on(self.parts[0].weight, 3))

    def _on(self, x: Tensor, i: int) -> Tensor:
        return oc.reshard(x, self.meshes[i], [oc.Replicate()]) if self.meshes else x


def several(nets: list[str], modes: list[str]) -> None:
    """Two ranks, four stages: numbers of one card, the order of the schedule, what was measured."""
    pair = [oc.ProcessMesh([i], ["pp"]) for i in range(2)]
    make = {"net": lambda meshes: Net(meshes, 4), "tied": Tied}
    for name in nets:
        for mode in modes:
            meshes = pair * 2 if name == "net" else [pair[0], pair[0], pair[1], pair[1]]
            torch.manual_seed(0)
            single = make[name]([])
            torch.manual_seed(0)
            net = make[name](meshes)
            x, y = torch.randn(8, 6), torch.randn(8, 6)
            expected = F.mse_loss(single(x), y)
            expected.backward()
            stages = meshes if name == "net" else None
            runner = pipeline.MarkedRunner(net, F.mse_loss, stages=stages)
            runner.meter = pipeline.Meter(net.parameters())
            loss = runner.step(x, y, mode, 4)
            close(oc.unshard(loss), expected.detach(), f"{name}, {mode}: loss")
            for (part, p), q in zip(net.named_parameters(), single.named_parameters(), strict=True):
                if q[1].grad is None:
                    assert p.grad is None, part
                else:
                    close(oc.unshard(p.grad), q[1].grad, f"{name}, {mode}: gradient of {part}")
            order = runner.schedule(mode, 4).compute().ranks[runner.place]
            assert [span.action for span in runner.timeline().spans] == list(order), mode
            assert runner.meter.now == 0 < runner.meter.peak and set(runner.meter.stages) == set(runner.mine), mode


@pytest.mark.share(2)
@pytest.mark.parametrize(("name", "mode"), [("net", "VPP"), ("net", "BFS"), ("tied", "1F1B"), ("tied", "ZBH1")])
def test_several_stages_on_a_mesh_and_halves(name: str, mode: str) -> None:
    run_ranks(several, 2, [name], [mode])


def test_the_order_of_messages_where_they_have_no_tags() -> None:
    for made in (pipeline.zb_h1(4, 8), pipeline.gpipe(3, 4)):
        one_order(made)
    with pytest.raises(ScheduleError, match="computes with 0SEND_F2 first"):
        one_order(backwards(2, 3))


@pytest.mark.parametrize("by", ["name", "schedule", "function"])
def test_a_schedule_is_planned_and_proved_once(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: what makes a schedule and what proves it are called in the first step alone."""
    calls = {"made": 0, "proved": 0}

    def counted(what: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[what] += 1
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(check, "_meet", counted("proved", check._meet))
    monkeypatch.setitem(modes._PLAIN, "1F1B", counted("made", pipeline.one_f_one_b))
    modes._made.cache_clear()
    check.prove.cache_clear()
    mine = pipeline.one_f_one_b(2, 3)
    schedule = {"name": "1F1B", "schedule": mine, "function": lambda ranks, m: pipeline.one_f_one_b(ranks, m)}[by]
    with oc.pretend(2):
        net = Net([oc.ProcessMesh([i], ["dp"]) for i in range(2)], 2)
        x = torch.randn(6, 6)
        for _ in range(3):
            pipeline.step_by_marks(net, F.mse_loss, x, x, schedule, 3)
    assert calls == {"made": by == "name", "proved": 1}


def refused() -> None:
    meshes = [oc.ProcessMesh([i], ["dp"]) for i in range(2)]
    net, x = Net(meshes, 2), torch.randn(4, 6)

    def said(**more: object) -> str:
        with pytest.raises(ScheduleError) as caught:
            pipeline.step_by_marks(**{"model": net, "loss_fn": F.mse_loss, "inputs": x, "targets": x} | more)  # type: ignore[arg-type]
        return str(caught.value)

    both = oc.ProcessMesh([0, 1], ["dp"])
    assert "give the mesh of each stage, first stage first" in said(schedule="VPP")
    assert "nothing in a program by marks says where one ends" in said(schedule="ZBV")
    assert "stages 1 and 2 lie on one mesh" in said(schedule="ZBV", stages=[*meshes, *meshes[::-1]])
    assert f"rank {oc.get_rank()} is in the meshes [" in said(stages=[both, meshes[oc.get_rank()]])
    assert "lie on 0 mesh(es)" in said(model=nn.Linear(6, 6))
    assert "a batch of 4 is to be cut into [1, 1, 1, 1, 0]" in said(microbatches=5)
    assert "the program ends in stage 1 of 4" in said(schedule="VPP", stages=meshes * 2)
    four = Net(meshes * 2, 4)
    static = oc.to_static(lambda x: pipeline.step_by_marks(four, F.mse_loss, x, x, "VPP", 2, meshes * 2))
    with pytest.raises(ScheduleError, match="its microbatches run in turns"):
        for _ in range(3):
            static(x)


def test_what_cannot_run_by_marks_is_refused() -> None:
    run_ranks(refused, 2)


def norms_over_meshes() -> None:
    for order in (1.0, 2.0, 3.0, float("inf")):
        given = [torch.arange(1.0, 5.0), torch.arange(2.0, 8.0)]
        alone = [nn.Parameter(x.clone()) for x in given]
        parts = [
            nn.Parameter(oc.shard_tensor(x, oc.ProcessMesh([rank], ["dp"]), [oc.Replicate()]))
            for rank, x in enumerate(given)
        ]
        for params in (alone, parts):
            for p in params:
                p.grad = p.detach().clone()
        expected = nn.utils.clip_grad_norm_(alone, 2.0, order)
        close(oc.unshard(nn.utils.clip_grad_norm_(parts, 2.0, order)), expected, f"norm of order {order}")
        for p, q in zip(parts, alone, strict=True):
            close(oc.unshard(p.grad), q.grad, f"clipped by the norm of order {order}")


def test_norms_of_every_order_are_those_of_all_meshes() -> None:
    run_ranks(norms_over_meshes, 2)


@multirank(4, timeout=60)
def test_microbatches_of_a_divided_batch_are_divided():
    """Of a batch that is Shard(0) each microbatch is, too: no rank along dp does another one's rows."""
    meshes = [oc.ProcessMesh([[0], [1]], ["dp", "tp"]), oc.ProcessMesh([[2], [3]], ["dp", "tp"])]
    seen: list[tuple[int, ...]] = []
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net = copy.deepcopy(plain)
    for layer, mesh in zip(net, meshes, strict=True):
        oc.shard_layer(layer, mesh)

    def forward(x):
        y = net[0](x)
        if meshes[0].coordinate() is not None:
            seen.append(tuple(x.to_local().shape))
        return net[1](oc.reshard(y, meshes[1], [oc.Shard(0), oc.Replicate()]))

    x, target = torch.randn(8, 4), torch.randn(8, 4)
    parts = [
        oc.shard_tensor(t, mesh, [oc.Shard(0), oc.Replicate()]) for t, mesh in zip((x, target), meshes, strict=True)
    ]
    loss = pipeline.step_by_marks(forward, F.mse_loss, *parts, "1F1B", 4, stages=meshes)
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    assert set(seen) == ({(1, 4)} if oc.get_rank() < 2 else set())
    assert_close(oc.unshard(loss).detach(), expected.detach())
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(oc.unshard(mine.grad), theirs.grad)
