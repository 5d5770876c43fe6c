"""Random states that a step sets back and forth: recomputation, fork_rng, named states; the rest is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

Net = Callable[[Tensor], Tensor]


def plain(net: Net, x: Tensor) -> Tensor:
    return net(x)


def recomputed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(net, net(y), use_reentrant=False), x, use_reentrant=False)


def reentrant(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net, x.requires_grad_(), use_reentrant=True)


def forked(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        y = net(x)
    return y + net(x)


def set_back(net: Net, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = net(x)
    torch.set_rng_state(state)
    return y * net(x)


WAYS = [plain, recomputed, reentrant, forked, set_back]


def five_steps(way: Any, mesh: oc.ProcessMesh | None, static: bool) -> list[Tensor]:
    torch.manual_seed(5)
    net: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.3))
    if mesh is not None:
        net = oc.shard_layer(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = way(net, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step) if static else step
    torch.manual_seed(9)
    found = []
    for i in range(5):
        x = torch.full((4, 6), float(i + 1))
        found.append(oc.unshard(run(x if mesh is None else oc.shard_tensor(x, mesh, [oc.Shard(0)]))).clone())
    if static:
        assert len(run.recordings) == 1
    return [*found, *(oc.unshard(p.detach()) for p in net.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("way", WAYS)
def test_states_within_a_step(way: Any) -> None:
    for a, b in zip(five_steps(way, None, False), five_steps(way, None, True), strict=True):
        assert torch.equal(a, b)


def on_ranks() -> None:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    for way in (plain, recomputed, forked, set_back):
        for a, b in zip(five_steps(way, mesh, False), five_steps(way, mesh, True), strict=True):
            assert torch.equal(a, b), way.__name__


def test_states_within_a_step_on_ranks() -> None:
    run_ranks(on_ranks, 2)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(2)


def seeded_unseen(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return x + torch.rand(2)


def seeded_after(x: Tensor) -> Tensor:
    y = x + torch.rand(2)
    torch.default_generator.manual_seed(3)
    return y


def pythons(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x * 3


def numpys(x: Tensor) -> Tensor:
    return x * (2 if np.random.rand() < 0.5 else 3)


@pytest.mark.parametrize(
    ("step", "what"),
    [(seeded, "torch.manual_seed is called"), (seeded_unseen, "default_generator is seeded"),
     (seeded_after, "default_generator is seeded")],
)  # fmt: skip
def test_draws_that_no_replay_repeats_are_refused(step: Callable[[Tensor], Tensor], what: str) -> None:
    static = oc.to_static(step)
    static(torch.ones(2))  # the first call only runs
    with pytest.raises(RecordingError, match=f"{what}.*inside the step, at .*test_static_random.py.*fork_rng"):
        static(torch.ones(2))
    assert torch.random.default_generator is torch.default_generator


@pytest.mark.parametrize(("step", "what"), [(pythons, "Python's"), (numpys, "NumPy's")])
def test_draws_in_python_are_said(step: Callable[[Tensor], Tensor], what: str) -> None:
    static = oc.to_static(step)
    static(torch.ones(2))
    with pytest.warns(UserWarning, match=f"draws from {what} random; every replay repeats"):
        static(torch.ones(2))
