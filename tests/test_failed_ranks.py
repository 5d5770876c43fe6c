"""A rank that fails alone within what ranks do together: the others hear who, and why, while its process still runs."""

from __future__ import annotations

import io
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from amounts import patience
from torch import nn

import onecard as oc
from onecard import pipeline
from onecard.comm.agree.joint import joint_step
from onecard.comm.base import failed
from onecard.comm.world import world
from onecard.errors import CommunicationError, StageError
from onecard.testing import run_ranks

LONG = 30.0
"""Seconds that a rank which has failed stays there."""


def _stays(key: str, count: int = 1) -> None:
    """As a program that has caught the error, and does something else, until the others have heard of it."""
    until = time.monotonic() + LONG
    while not dist.distributed_c10d._get_default_store().check([key]) and time.monotonic() < until:
        time.sleep(0.05)


def _heard(act: Any) -> tuple[float, str]:
    begin = time.monotonic()
    try:
        act()
    except CommunicationError as error:
        found = str(error)
    else:
        found = "ended well"
    dist.distributed_c10d._get_default_store().set(f"heard {oc.get_rank()}", "")
    return time.monotonic() - begin, found


class Fails(nn.Linear):
    """Its second microbatch is one that it cannot do."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if oc.get_rank() == 1 and self.calls == 2:
            raise ValueError("a row that nobody expected")
        return super().forward(x)


def by_layers() -> tuple[float, str]:
    runner = pipeline.Runner({oc.get_rank(): Fails(4, 4)}, nn.functional.mse_loss)
    x = torch.ones(8, 4)
    if oc.get_rank() == 0:
        return _heard(lambda: runner.step(pipeline.one_f_one_b(2, 4), x, x))
    with pytest.raises(ValueError, match="nobody expected"):
        runner.step(pipeline.one_f_one_b(2, 4), x, x)
    _stays("heard 0")
    return 0.0, ""


def by_marks() -> tuple[float, str]:
    meshes = [oc.ProcessMesh([i], ["dp"]) for i in range(2)]
    parts = [oc.shard_layer(Fails(4, 4), mesh) for mesh in meshes]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = parts

        def forward(self, x: Any) -> Any:
            x = self.first(oc.shard_tensor(x, meshes[0], [oc.Replicate()]))
            return self.second(oc.reshard(x, meshes[1], [oc.Replicate()]))

    net, x = Whole(), torch.ones(8, 4)

    def loss(y: Any, want: Any) -> Any:
        return nn.functional.mse_loss(y, oc.shard_tensor(want, meshes[1], [oc.Replicate()]))

    if oc.get_rank() == 0:
        return _heard(lambda: pipeline.step_by_marks(net, loss, x, x))
    with pytest.raises(ValueError, match="nobody expected"):
        pipeline.step_by_marks(net, loss, x, x)
    _stays("heard 0")
    return 0.0, ""


@pytest.mark.parametrize("program", [by_layers, by_marks])
def test_an_error_of_one_rank_in_a_step(program: Any) -> None:
    (seconds, said), _ = run_ranks(program, 2, timeout=patience(60.0))
    assert "rank 1 has failed in" in said and "ValueError: a row that nobody expected" in said, said
    assert seconds < patience(5.0)


class Heard(io.StringIO):
    """In the place of the errors' stream: says in the store what it was told."""

    def write(self, text: str) -> int:
        if "has failed in" in text:
            dist.distributed_c10d._get_default_store().set("heard 0", "")
        return super().write(text)


def over_gloo() -> str:
    """Rank 0 waits in C++ for a rank that has caught its error, and comes some looks later."""
    world.init()
    if oc.get_rank() == 1:
        with pytest.raises(ValueError, match="nobody expected"), joint_step("step", (0, 1)):
            raise ValueError("a row that nobody expected")
        _stays("heard 0")
        time.sleep(2.2)
        dist.all_reduce(torch.ones(1))
        return ""
    before, sys.stderr = sys.stderr, Heard()
    with joint_step("step", (0, 1)):
        dist.all_reduce(torch.ones(1))
    told, sys.stderr = sys.stderr, before
    return told.getvalue()  # type: ignore[attr-defined]


def test_a_wait_that_is_not_ours_is_told_once() -> None:
    told, _ = run_ranks(over_gloo, 2, backend="gloo", timeout=patience(60.0))
    assert told.count("onecard: rank 1 has failed in step (call 1), in which rank 0 waits") == 1, told
    assert "Rank 1 says: ValueError: a row that nobody expected" in told and told.count("\n") == 1


def _cut(hook: bool) -> tuple[float, str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2, at=["2"]))
    x, y = torch.ones(4, 4), torch.ones(4, 2)
    for _ in range(2):
        run(x, y)
    if hook:  # memory that is gone in the midst of a replay
        if oc.get_rank() == 1:
            net[2].weight.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError):
                run(x, y)
            _stays("heard 0")
            return 0.0, ""
        return _heard(lambda: run(x, y))
    if oc.get_rank() == 1:
        with pytest.raises(StageError):
            [float(p.detach().norm()) for p in net.parameters()]
        _stays("heard 0")
        return 0.0, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def waits() -> None:
            until = time.monotonic() + LONG
            failed.doing.here = failed.Together("step", (0, 1), 0, 3)
            while not caught and time.monotonic() < until:
                assert failed.looked() == ""
                time.sleep(0.05)
            failed.doing.here = None

        seconds, _ = _heard(waits)
    return seconds, str([str(w.message) for w in caught])


@pytest.mark.proof
def test_an_error_of_one_rank_in_a_replay() -> None:
    (seconds, said), _ = run_ranks(_cut, 2, True, timeout=patience(60.0))
    assert "rank 1 has failed in step (call 3)" in said, said
    assert seconds < patience(5.0)


@pytest.mark.proof
def test_a_refusal_between_steps_is_told_to_who_waits_for_the_next() -> None:
    (seconds, said), _ = run_ranks(_cut, 2, False, timeout=patience(60.0))
    assert "to which rank 1 has not come since it failed. Rank 1 says:" in said and "its memory here" in said, said
    assert seconds < patience(5.0)


def _flagged() -> tuple[float, str]:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    torch.manual_seed(0)
    net = oc.shard_layer(nn.Linear(4, 2), mesh)
    opt = oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    flag = {"on": False}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        if flag["on"]:
            loss = 2 * loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = oc.to_static(step)
    x = oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Shard(0)])
    for _ in range(5):
        run(x)
    flag["on"] = oc.get_rank() == 1
    found = _heard(lambda: run(x))
    _stays("heard 0")
    _stays("heard 1")
    return found


def test_a_flag_of_one_rank_in_a_recorded_step() -> None:
    (seconds, said), (others, heard) = run_ranks(_flagged, 2, timeout=patience(60.0))
    assert "rank 1 records anew step (call " in said and "make the flag an argument" in said, said
    assert "rank 0 has failed in step (call " in heard, heard
    assert seconds < patience(5.0) and others < patience(9.0)


def _goes_on(calls: int) -> tuple[float, str]:
    """Rank 1's program catches its error in the midst of a replay, and is in the next call at once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    opt = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2, at=["2"]))
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
    for _ in range(calls):
        run(x, y)
    begin = time.monotonic()
    with pytest.raises((CommunicationError, IndexError)) as first:  # no class is 17
        run(x, torch.full((4,), 17))
    seconds = time.monotonic() - begin
    with pytest.raises(CommunicationError):
        run(x, y)
    return seconds, str(first.value)


@pytest.mark.share(1)
@pytest.mark.parametrize("calls", [2, 0])  # a replay, and the first one, that of a step which makes gradients
def test_who_has_failed_is_heard_though_it_goes_on(calls: int) -> None:
    (seconds, said), _ = run_ranks(_goes_on, 2, calls, timeout=patience(60.0))
    assert "rank 1 has failed in step" in said and "out of bounds" in said, said
    assert seconds < patience(5.0)
