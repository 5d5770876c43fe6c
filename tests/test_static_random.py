"""Random states that a step sets back and forth: recomputation, fork_rng, named states; the rest is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard import recorded
from onecard.errors import RecordingError
from onecard.static import passes
from onecard.static.capture import randomness
from onecard.static.passes import PASSES
from onecard.static.step.order import draws
from onecard.static.step.writes import written_by
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


@pytest.mark.proof
def test_states_within_a_step_on_ranks() -> None:
    run_ranks(on_ranks, 2)


def masks(where: oc.ProcessMesh | None, static: bool, **options: Any) -> list[Tensor]:
    """What is left of ones, twice dropped out, in each of six steps."""
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    nets = [first, second] if where is None else [oc.shard_layer(net, where) for net in (first, second)]
    x = torch.ones(64) if where is None else oc.shard_tensor(torch.ones(64), where, [oc.Shard(0)])

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return nets[0](x), nets[1](x)

    run = oc.to_static(step, **options) if static else step
    torch.manual_seed(9)
    with torch.no_grad():
        return [oc.unshard(y).clone() for _ in range(6) for y in run(x)]


def drawn_anew() -> None:
    """No two dropouts of any two steps are alike, and each is that of the program as it is."""
    for where in (None, oc.ProcessMesh([0, 1], ["dp"]) if oc.get_world_size() == 2 else None):
        for options in ({}, {"without": [*PASSES]}, {"also": ["recompute"]}):
            expected, found = masks(where, False), masks(where, True, **options)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert not any(torch.equal(a, b) for a, b in combinations(found, 2))


def test_every_replay_draws_anew() -> None:
    drawn_anew()
    run_ranks(drawn_anew, 2)


def baked(graph: fx.Graph) -> fx.Graph:
    """A fault: the first draw of each kind is made once, and then is what it was."""
    made = fx.Graph()
    names = dict[fx.Node, fx.Node]()
    kept = dict[Any, Any]()

    def once_only(target: Any) -> Any:
        def once(*args: Any, **kwargs: Any) -> Any:
            if target not in kept:
                value = target(*args, **kwargs)
                kept[target] = value.clone() if isinstance(value, Tensor) else value
            is_written = isinstance(kept[target], Tensor) and args and isinstance(args[0], Tensor)
            return args[0].copy_(kept[target]) if is_written else kept[target]

        return once

    for node in graph.nodes:
        if node.op == "call_function" and draws(node):
            args = fx.map_arg(node.args, names.__getitem__)
            once = once_only(node.target)
            recorded.writes[once] = (0,) if written_by(node) else ()
            names[node] = made.call_function(once, args, dict(node.kwargs))
            names[node].meta.update(node.meta)
        else:
            names[node] = made.node_copy(node, names.__getitem__)
            names[node].name = node.name if node.op == "placeholder" else names[node].name
    return made


def planted() -> str:
    mesh = oc.ProcessMesh([0, 1], ["dp"]) if oc.get_world_size() == 2 else None
    with patch.dict(PASSES, fixed=baked), patch.dict(recorded.writes), patch.object(passes, "check_drawn", Mock()):
        found = masks(mesh, True, without=["inplace"])
    assert any(torch.equal(a, b) for a, b in combinations(found[4:], 2)), "the fault shows in what is drawn"
    with patch.dict(PASSES, fixed=baked), patch.dict(recorded.writes), pytest.raises(RecordingError) as said:
        masks(mesh, True)
    return str(said.value)


def test_a_key_that_is_baked_in_is_seen() -> None:
    for said in (planted(), *run_ranks(planted, 2)):
        assert "the pass 'fixed': of 2 random draws" in said and "anew at every replay" in said


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


OWN = random.Random(3)


@pytest.mark.parametrize("drawn", [random.random, np.random.rand, OWN.random])
def test_draws_in_python_are_refused_under_microbatches(drawn: Callable[[], float]) -> None:
    """Nobody runs a step of microbatches as it is, so that no comparison would make good what a replay repeats."""
    weight = torch.ones(2, requires_grad=True)

    def step(x: Tensor) -> None:
        loss = (x @ weight).square().mean()
        (loss * 2 if drawn() < 0.7 else loss).backward()
        weight.grad = None

    static = oc.to_static(step, k_steps=2, avg=True)
    static(torch.ones(4, 2))
    with pytest.raises(RecordingError, match=r"step: the step draws from .*pass .* arguments?\. Or draw with torch"):
        static(torch.ones(4, 2))


def test_the_state_of_a_gpus_generator_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is recorded another object stands where torch has its generators; the nodes ask what stood there before."""
    real = torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.cuda, "default_generators", (real,))
    seen = randomness._SeenGenerator("cuda:0")
    monkeypatch.setattr(torch.cuda, "default_generators", (seen,))
    state = seen.get_state()
    assert torch.equal(state, real.get_state())
    torch.rand(3, generator=real)
    seen.set_state(state)
    assert torch.equal(real.get_state(), state)
