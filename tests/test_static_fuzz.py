"""Random programs with views, in-place writes, gradients and messages: a replay gives eager's bits, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amounts import amount
from comparing import compared, never
from torch import Tensor

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.passes import in_place, inplace
from onecard.testing import run_ranks

SIZE = 4
Op = Callable[[list[Any], random.Random], Any]

POINTWISE = ["relu", "tanh", "exp", "neg", "sigmoid", "abs", "sin"]
IN_PLACE = ["mul_", "add_", "sub_", "copy_"]


def program(seed: int, where: oc.ProcessMesh | None) -> Callable[[Tensor], list[Tensor]]:
    """A step of a few dozen operators on square matrices, drawn by a seed: the same at every call."""
    torch.manual_seed(seed)
    weight = torch.randn(SIZE, SIZE) * 0.3
    buffer = torch.zeros(SIZE, SIZE)
    if where is not None:
        weight = oc.shard_tensor(weight, where, [oc.Replicate()])
        buffer = oc.shard_tensor(buffer, where, [oc.Replicate()])
    weight.requires_grad_()

    def step(x: Tensor) -> list[Tensor]:
        draw = random.Random(seed)
        pool: list[Tensor] = [x * 1.0, buffer + 0.5]
        with torch.no_grad():
            for _ in range(draw.randrange(6, 22)):
                pool.append(one_more(pool, draw, buffer))
        loss = ((x @ weight).tanh() * pool[draw.randrange(len(pool))].detach()).sum()
        weight.grad = None
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad * 0.01)
        return [loss.detach(), *draw.sample(pool, 3)]

    def one_more(pool: list[Tensor], draw: random.Random, held: Tensor) -> Tensor:
        a, b = draw.choice(pool), draw.choice(pool)
        kind = draw.random()
        if kind < 0.35:
            return getattr(torch, draw.choice(POINTWISE))(a).clamp(-3, 3)
        if kind < 0.5:
            return draw.choice([torch.add, torch.mul, torch.sub, torch.maximum])(a, b)
        if kind < 0.6:
            return draw.choice(
                [lambda: a.t(), lambda: a[:], lambda: a.view(SIZE, SIZE), lambda: a.detach(), lambda: a.clone()]
            )()
        if kind < 0.72:
            getattr(a, draw.choice(IN_PLACE))(b.clone() * 0.5)
            return a
        if kind < 0.8 and where is None:  # on ranks the window of a cut tensor is found by a mask, which is refused
            a[draw.randrange(SIZE)].mul_(0.5)
            return a
        if kind < 0.86:
            return torch.softmax(a, draw.randrange(2)) + torch.arange(SIZE)
        if kind < 0.9:
            held.mul_(0.9).add_(a * 0.1)
            return held * 2
        if kind < 0.95 and where is not None:
            return oc.reshard(a.clone(), where, [draw.choice([oc.Replicate(), oc.Shard(0), oc.Shard(1)])])
        return (a @ b).clamp(-2, 2)

    return step


def tried(seed: int, where: oc.ProcessMesh | None, **options: Any) -> None:
    """Four calls, compared bit by bit."""
    found = []
    for static in (False, True):
        step = program(seed, where)
        run = oc.to_static(step, **options) if static else step
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(4)]
        if where is not None:
            given = [oc.shard_tensor(x, where, [oc.Shard(0)]) for x in given]
        with compared(never):
            found.append([[held(y).clone() for y in run(x)] for x in given])
        if static:
            assert len(run.recordings) == 1
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True)), f"seed {seed}, call {i}, {options}"


def held(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, oc.DistTensor) else x


OPTIONS: list[dict[str, Any]] = [{}, {"also": ["recompute"]}]


@pytest.mark.proof
def test_random_programs_on_one_card() -> None:
    for seed in range(amount(10, 30)):
        tried(seed, None, **OPTIONS[seed % 2])


def on_two_ranks(seeds: range) -> int:
    from onecard.static.passes import overlap

    overlap.LARGE = 0
    where = oc.ProcessMesh([0, 1], ["dp"])
    refused = 0
    for seed in seeds:
        try:
            tried(seed, where, **OPTIONS[seed % 2])
        except RecordingError:  # a write to a window of a tensor that is cut: by a mask
            refused += 1
    return refused


@pytest.mark.proof
def test_random_programs_on_two_ranks() -> None:
    one, other = run_ranks(on_two_ranks, 2, range(100, amount(105, 116)))
    assert one == other <= 2


def test_a_careless_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: written in place without asking whether somebody still reads."""
    monkeypatch.setattr(inplace, "_spent", lambda node, memory: next(iter(memory.roots[node.args[0]])))
    monkeypatch.setattr(inplace, "_is_last_use", lambda node, sharing: True)
    assert in_place is not None
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(12):
            tried(seed, None)
