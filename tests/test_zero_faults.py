"""ZeRO: faults that are planted are seen, a rank that is killed is named, and recordings replay with overlap."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amounts import patience
from test_zero import STAGES, batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import CommunicationError
from onecard.tensor import buckets
from onecard.testing import _run, run_ranks
from onecard.train.zero import reducer
from onecard.train.zero.reducer import Reducer

S = oc.Shard


class Twice(nn.Module):
    """A parameter that is used twice, one that is tied, one that a branch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, other: bool = True) -> Tensor:
        h = torch.tanh(self.first(self.first(x)))
        h = self.second(h)
        return h + self.other(h) if other else h


def steps(stage: int | None, overlap: bool, mesh: Any = None, branch: Callable[[], bool] = lambda: True) -> Any:
    """Losses and weights after a few steps with two microbatches; one card's without a mesh."""
    net: Any = Twice()
    if mesh is not None:
        oc.shard_layer(net, mesh)
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer, STAGES[stage]("dp", mesh) if stage else None, overlap=overlap)
    losses = []
    for step in range(4):
        for micro in range(2):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + micro))
            x = oc.shard_tensor(x, mesh, [S(0)]) if mesh is not None else x
            loss = net(x, branch()).square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [oc.unshard(p.detach()) for p in net.parameters()]


def differs(stage: int, overlap: bool) -> bool:
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    losses, weights = steps(stage, overlap, mesh)
    expected, others = steps(None, False)
    same = losses == pytest.approx(expected, rel=1e-5)
    return not same or any(not torch.allclose(w, o, rtol=1e-5, atol=1e-6) for w, o in zip(weights, others, strict=True))


def sent_twice() -> None:
    """A bucket is summed, and what it gives summed again."""
    was = buckets.start_scatter

    def again(cuts: Any, *args: Any, **kwargs: Any) -> Any:
        end = was(cuts, *args, **kwargs)

        def both() -> Any:
            parts = end()
            for part in parts:
                oc.all_reduce(part)
            return parts

        return both

    reducer.start_scatter = again


def averaged_twice() -> None:
    was = reducer.take
    reducer.take = lambda param, cut, part: was(param, cut, part / oc.get_world_size())


def kept_is_lost() -> None:
    """What earlier microbatches gave is dropped."""
    was = Reducer._end

    def end(self: Any, started: Any) -> None:
        self._kept.clear()
        was(self, started)

    Reducer._end = end  # type: ignore[method-assign]


def last_use_only() -> None:
    """A parameter's bucket is taken to be complete before all of its gradients are there."""
    was = Reducer.after

    def after(self: Any, param: Any) -> None:
        if isinstance(param.grad, oc.DistTensor) and param.dim() == 2:
            param.grad = param.grad * 0.5
        was(self, param)

    Reducer.after = after  # type: ignore[method-assign]


def planted(fault: Callable[[], None] | None, stage: int, overlap: bool) -> bool:
    buckets.BUCKET_BYTES = 128
    if fault is not None:
        fault()
    return differs(stage, overlap)


def all_without_a_fault() -> list[bool]:
    return [planted(None, stage, overlap) for stage in STAGES for overlap in (False, True)]


@pytest.mark.proof
def test_planted_faults_are_seen():
    assert run_ranks(all_without_a_fault, 2) == [[False] * 6] * 2
    for fault, stage in ((sent_twice, 1), (sent_twice, 2), (averaged_twice, 3), (kept_is_lost, 2), (last_use_only, 2)):
        assert run_ranks(planted, 2, fault, stage, True) == [True] * 2, (fault.__name__, stage)


def branching(stage: int, overlap: bool) -> str:
    """Rank 1 leaves a layer out: in one program for all ranks that is a mistake, which is said and does not hang."""
    buckets.BUCKET_BYTES = 128
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    try:
        steps(stage, overlap, mesh, lambda: oc.get_rank() == 0)
    except CommunicationError as fault:
        return f"{fault} {getattr(fault, '__notes__', '')}"
    return "no error"


@pytest.mark.proof
def test_a_branch_on_the_rank_is_an_error_and_no_hang():
    for stage in (0, *STAGES):
        for overlap in (False, True):
            for found in run_ranks(branching, 2, stage, overlap):
                assert "different collectives" in found or "out of step" in found or "stopped" in found, (stage, found)


def killed(stage: int) -> tuple[float, str]:
    os.environ["ONECARD_TIMEOUT"] = "5"
    buckets.BUCKET_BYTES = 128
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    net = oc.shard_layer(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1), STAGES[stage]("dp", mesh, overlap=True))
    if oc.get_rank() == 2:
        calls: list[int] = []

        def die(parameter: Any) -> None:
            calls.append(1)
            if len(calls) == 3:  # in the middle of the third backward
                os.kill(os.getpid(), signal.SIGKILL)

        net[1].weight.register_post_accumulate_grad_hook(die)
    begin = time.monotonic()
    try:
        for i in range(6):
            begin = time.monotonic()
            x = oc.shard_tensor(torch.randn(6, 8, generator=torch.Generator().manual_seed(i)), mesh, [S(0)])
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except CommunicationError as fault:
        _survived(time.monotonic() - begin, str(fault))
        raise
    return 0.0, ""


def _survived(seconds: float, words: str) -> None:
    print(f"survivor after {seconds:.1f} s: {words}", flush=True)


@pytest.mark.share(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_kill_of_one_rank_ends_the_others_with_its_name(stage, capfd, monkeypatch):
    monkeypatch.setattr(_run, "GRACE", 60.0)  # both have their say
    begin = time.monotonic()
    with pytest.raises(Exception, match="rank 2"):
        run_ranks(killed, 3, stage)
    assert time.monotonic() - begin < patience(30)
    said = [line for line in capfd.readouterr().out.splitlines() if "survivor after" in line]
    assert len(said) == 2 and all("rank 2" in line for line in said), said


def recorded() -> None:
    buckets.BUCKET_BYTES = 128
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for stage in (0, *STAGES, "blocks"):
        found = []
        for static, overlap in ((False, False), (False, True), (True, True)):
            torch.manual_seed(0)
            net = oc.shard_layer(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7)), mesh)
            made = torch.optim.AdamW(net.parameters(), 0.05, fused=True)
            made_of: Any = STAGES[stage]("dp", mesh) if stage in STAGES else None  # type: ignore[index]
            made_of = oc.ShardingStage3("dp", mesh, model=net) if stage == "blocks" else made_of
            optimizer = oc.shard_optimizer(made, made_of, overlap=overlap)

            def step(x: Tensor, y: Tensor, net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            run: Any = oc.to_static(step) if static else step
            losses, data = [], batches()
            for _ in range(6):
                x = oc.shard_tensor(nn.functional.one_hot(next(data)[0] % 6, 6).float(), mesh, [S(0)])
                losses.append(run(x, oc.shard_tensor(next(data)[1], mesh, [S(0)])).item())
            found.append((losses, [oc.unshard(p.detach()).tolist() for p in net.parameters()]))
            assert not static or len(run.recordings) == 1
        assert found[0] == found[1] == found[2], stage


@pytest.mark.proof
def test_recorded_steps_replay_with_overlap():
    run_ranks(recorded, 2)
