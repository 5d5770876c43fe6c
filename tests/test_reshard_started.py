"""A reshard that is started and awaited where its result is first used: the values, gradients and messages of one that is not."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amounts import amount
from test_reshard_random import a_case, a_layout, resharded
from torch import Tensor, nn

import onecard as oc
from onecard.comm.issue import started
from onecard.comm.issue.run import messages
from onecard.moves.resharding import plan
from onecard.place.layout import Layout
from onecard.tensor import moves
from onecard.testing import assert_close, run_ranks

R, S, P = oc.Replicate, oc.Shard, oc.Partial


@contextmanager
def noted() -> Iterator[Counter[str]]:
    """Counts the last messages of plans by kind: those left under way, and those that were not ("at once")."""
    seen: Counter[str] = Counter()
    start = moves.start_steps

    def starting(steps: Any, local: Tensor, shape: Any) -> Any:
        coming = start(steps, local, shape)
        kind = steps[messages(steps)[-1]].kind
        seen[kind if coming.under_way else f"at once: {kind}"] += 1
        return coming

    moves.start_steps = starting
    yield seen
    moves.start_steps = start


def a_move(chance: random.Random) -> tuple[Any, Layout, Layout, Any]:
    """A case with a message, if only because a few more were drawn."""
    for _ in range(5):
        whole, source, _, numbers = a_case(chance)
        target = a_layout(chance, source.mesh, whole.ndim, source.pending[0][1] if source.pending else "sum")
        if min(whole.shape, default=0) > 1 and messages(plan(whole.shape, 8, source, target)):
            break
    return whole, source, target, numbers


def cases(seed: int, count: int, seen: Counter[str]) -> None:
    """Random layouts on one mesh: started and not, the same bits, whatever is written to the operand meanwhile."""
    chance = random.Random(seed)
    for number in range(count):
        whole, source, target, numbers = a_move(chance)
        found, before = [], seen.total()
        for later in (False, True):
            draws = copy.deepcopy(numbers)
            x, _ = resharded(whole, source, source, draws)
            y = moves.Reshard.apply(x, target, later)
            with torch.no_grad():
                x.mul_(2)  # what is under way has been read
            assert y._spec.layout is target
            local = y.detach().to_local().clone()
            if x.requires_grad:
                weight = torch.linspace(-1, 1, whole.size, dtype=y.dtype).reshape(whole.shape)
                (y * oc.shard_tensor(weight, y.mesh, [R()] * y.mesh.ndim)).sum().backward()
                assert_close(x.grad.full_tensor(), weight)
            found.append((local, y._spec, y.detach().full_tensor()))
        (sync, spec, _), (later_on, same, value) = found
        assert spec is same, (number, source, target)
        assert sync.stride() == later_on.stride() and torch.equal(sync, later_on), (number, source, target)
        if seen.total() > before and target is not source.reduced():  # else the result may be the operand's memory
            np.testing.assert_allclose(value.numpy(), whole)


KINDS = {
    "all_gather": ([S(0)], [R()]),
    "all_reduce": ([P()], [R()]),
    "reduce_scatter": ([P()], [S(0)]),
    "all_to_all": ([S(0)], [S(1)]),
}


def nobody_waits() -> None:
    """Rank 1 takes part only when rank 0 says that it has gone on: one that waited in the call would wait for ever."""
    mesh, me = oc.ProcessMesh([0, 1], ["x"]), oc.get_rank()
    word = torch.zeros(1)
    oc.from_local(
        word, mesh, [P()]
    ).full_tensor()  # the first message along an axis makes its group, and waits for that
    for kind, (source, target) in KINDS.items():
        local = torch.full((4, 2), me + 1.0)
        x = oc.from_local(local, mesh, source)
        if me == 1:
            started.irecv(word, 0, 7).wait()
        y = oc.reshard(x, mesh, target, async_op=True)
        assert oc.get_rank() > 1 or "under way" in repr(y)
        local.zero_()  # what is under way is a copy
        if me == 0:
            started.isend(word, 1, 7)
        want = oc.from_local(torch.full((4, 2), me + 1.0), mesh, source).full_tensor()
        assert torch.equal(y.full_tensor(), want), kind
        assert "under way" not in repr(y)  # and printing does not wait


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda y: y + 1,
    "in place": lambda y: y.add_(1),
    "sum": lambda y: y.sum(),
    "item": lambda y: y[0, 0].item(),
    "view": lambda y: y.T.flatten(),
    "to_local": lambda y: y.to_local(),
    "wait": lambda y: y.wait().to_local(),
    "copy": lambda y: copy.copy(y).mul_(2),
    "deepcopy": lambda y: copy.deepcopy(y),
    "data": lambda y: y.data,
    "parameter": lambda y: nn.Parameter(y),
    "foreach": lambda y: torch._foreach_mul([y, y], 2.0)[1],
    "list": lambda y: torch.stack([y, y]),
    "linear": lambda y: F.linear(torch.ones(2, y.shape[1]), y),
    "set item": lambda y: (y.__setitem__((0, 1), 5.0), y)[1],
    "started again": lambda y: oc.reshard(y, y.mesh, [S(1), R()], async_op=True),
    "another mesh": lambda y: oc.reshard(y, oc.ProcessMesh([0, 1, 2], ["z"]), [S(0)]),
    "memory": lambda y: torch.tensor(y.untyped_storage().nbytes() == y.to_local().nbytes),
    "address": lambda y: torch.tensor(y._spec.layout.pending != () or y.to_local().shape != y.shape or y.data_ptr() > 0),
    "taken": lambda y: _takes(y),
    "repr": lambda y: (repr(y), y)[1],
    "numpy": lambda y: torch.from_numpy(y.numpy()),
}  # fmt: skip


def _takes(y: Any) -> Any:
    z = oc.shard_tensor(torch.zeros(y.shape), y.mesh, [R(), R()])
    z.data = y
    return z


def uses() -> None:
    """Every way to use a result: as after a reshard that waits."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    for source, target in (([S(0), S(0)], [R(), S(0)]), ([P(), S(1)], [R(), S(1)]), ([S(1), R()], [S(0), R()])):
        for name, use in USES.items():
            results = []
            for later in (False, True):
                local = torch.arange(12.0).view(4, 3)
                x = oc.shard_tensor(local, mesh, source)
                results.append(use(oc.reshard(x, mesh, target, async_op=later)))
            sync, later_on = (r.full_tensor() if isinstance(r, oc.DistTensor) else torch.as_tensor(r) for r in results)
            assert torch.equal(sync, later_on), (name, source, target)


def many_under_way() -> None:
    """Several at once, awaited in another order, some never, in a step that is recorded, too."""
    mesh = oc.ProcessMesh([0, 1, 2, 3], ["x"])
    weights = [oc.shard_tensor(torch.randn(8, 8, generator=torch.manual_seed(i)), mesh, [S(0)]) for i in range(6)]
    whole = [w.full_tensor() for w in weights]
    coming = [oc.reshard(w, mesh, [R()], async_op=True) for w in weights]
    del coming[2]
    for y, want in zip(reversed(coming), reversed(whole[:2] + whole[3:]), strict=True):
        assert torch.equal(y.to_local(), want)
    merged = oc.shard_tensor(torch.arange(24.0).view(2, 12), mesh, [S(1)]).unflatten(1, (4, 3)).flatten(0, 1)
    assert merged.layout.merged
    got = oc.reshard(merged, mesh, [R()], async_op=True)
    assert torch.equal(got.full_tensor(), oc.reshard(merged, mesh, [R()]).full_tensor())

    def step(x: Tensor, w: Tensor) -> Tensor:
        y = oc.reshard(w, mesh, [R()], async_op=True)
        return (x.tanh() @ y).sum()

    x = torch.ones(3, 8)
    recorded = oc.to_static(step)
    for _ in range(3):
        assert torch.equal(recorded(x, weights[0]).full_tensor(), step(x, weights[1]).full_tensor()) is False
        assert torch.equal(recorded(x, weights[0]).full_tensor(), step(x, weights[0]).full_tensor())
    with oc.explain() as told:
        oc.reshard(weights[0], mesh, [R()], async_op=True).wait()
    with oc.explain() as plain:
        oc.reshard(weights[0], mesh, [R()])
    assert [m.step for m in told.messages] == [m.step for m in plain.messages] != []


def everything(count: int) -> list[Counter[str]]:
    nobody_waits()
    many_under_way()
    with noted() as drawn:
        cases(0, count, drawn)
    with noted() as used:
        uses()
    return [drawn, used]


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize(("backend", "count"), [(None, amount(30, 60)), ("gloo", amount(5, 15))])
def test_a_started_reshard_is_one_that_waits(backend, count):
    every, each = zip(*run_ranks(everything, 4, count, backend=backend), strict=True)
    drawn = sum(every, Counter())
    assert count < 60 or min(drawn[kind] for kind in KINDS) > 1, drawn
    for used in each:
        assert {*used} == {"all_gather", "all_reduce", "all_to_all"}, used  # all of them were left under way
