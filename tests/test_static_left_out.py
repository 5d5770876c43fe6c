"""Recorded steps: what had no gradient, what is not compared, and what is given up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, seeded
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.comm.agree import sparse_check
from onecard.fleet.utils import sequence_parallel_utils as sp
from onecard.testing import run_ranks


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batches(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(8, 4, generator=draws) for _ in range(count)]


def unfrozen(recorded: bool, clips: bool) -> list[Tensor]:
    """An update is recorded while a layer is frozen, which is trained later."""
    model: Any = seeded(net)
    weights = [*model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.5)

    def update() -> None:
        if clips:
            nn.utils.clip_grad_norm_(weights, 0.2)
        optimizer.step()

    step = oc.to_static(update) if recorded else update
    for i, x in enumerate(batches(8)):
        if i in (1, 5):
            model[2].requires_grad_(i == 5)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()
    return [p.detach() for p in weights]


@pytest.mark.filterwarnings("ignore:.*is recorded anew")
@pytest.mark.parametrize("clips", [False, True])
def test_what_was_frozen_when_an_update_was_recorded_is_updated_later(clips: bool) -> None:
    for mine, one in zip(unfrozen(True, clips), unfrozen(False, clips), strict=True):
        close(mine, one)


def by_hand(weights: list[Any]) -> None:
    for p in weights:
        if p.grad is not None:
            p.add_(p.grad, alpha=-0.1)


def by_norm(weights: list[Any]) -> None:
    nn.utils.clip_grad_norm_(weights, 0.1)


def by_value(weights: list[Any]) -> None:
    nn.utils.clip_grad_value_(weights, 0.01)


def looked_at(what: Any, recorded: bool) -> list[Tensor]:
    """A list of weights, to which neither a module nor an optimizer of the step leads; a layer is frozen now and then."""
    model: Any = seeded(net)
    weights = [*model.parameters()]

    @torch.no_grad()
    def update() -> None:
        what(weights)

    step = oc.to_static(update) if recorded else update
    for i, x in enumerate(batches(8)):
        model[2].requires_grad_(i in (0, 4, 5, 6, 7))
        for p in weights:
            p.grad = None
        model(x).square().mean().backward()
        step()
        if what is not by_hand:
            with torch.no_grad():
                by_hand(weights)
    return [p.detach() for p in weights]


@pytest.mark.filterwarnings("ignore:.*is recorded anew")
@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("what", [by_hand, by_norm, by_value])
def test_whether_there_is_a_gradient_is_asked_of_whatever_is_looked_at(
    what: Any, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_check.on, "here", compared)
    for mine, one in zip(looked_at(what, True), looked_at(what, False), strict=True):
        close(mine, one)


@pytest.mark.parametrize("compared", [False, True])
def test_microbatches_are_one_cards_whether_calls_are_compared_or_not(
    compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``ONECARD_CHECK=0`` a call that was due to be compared did the step once more, on its first microbatch."""
    monkeypatch.setattr(sparse_check.on, "here", compared)
    found = []
    for k in (1, 2):
        model = seeded(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        static = oc.to_static(step, k_steps=2) if k == 2 else step
        found.append([*(static(x) for x in batches(9)), *(p.detach() for p in model.parameters())])
    for one, mine in zip(*found, strict=True):
        close(mine, one)


def sharded(static: bool, keeps: bool) -> tuple[list[list[int]], list[Tensor]]:
    begin(sharding=2)
    rank = torch.distributed.get_rank()
    model: Any = fleet.distributed_model(seeded(net))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))

    def step(x: Tensor) -> None:
        (model if keeps else optimizer).zero_grad(set_to_none=not keeps)
        model(x).square().mean().backward()
        optimizer.step()

    run: Any = oc.to_static(step, k_steps=2) if static else step
    sent = []
    for x in batches(5):
        with oc.explain() as report:
            run(x.chunk(2)[rank].clone())
        sent.append([m.step.bytes for m in report.messages if m.step.kind == "all_reduce"])
    return sent, [p.detach().clone() for p in model.parameters()]


def test_gradients_that_are_given_up_are_not_summed() -> None:
    """Along sharding a step averages each rank's part itself: ``zero_grad`` summed what was left of it, all of it."""
    one: Any = seeded(net)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5)
    for x in batches(5):
        optimizer.zero_grad()
        one(x).square().mean().backward()
        optimizer.step()
    for keeps in (False, True):
        sent, weights = run_ranks(sharded, 2, False, keeps)[0]
        assert max(map(sum, sent)) < 64, sent  # a few bytes: which gradients there are
        for mine, whole in zip(weights, one.parameters(), strict=True):
            close(mine, whole.detach())
    for mine, whole in zip(run_ranks(sharded, 2, True, False)[0][1], one.parameters(), strict=True):
        close(mine, whole.detach())


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = sp.ColumnSequenceParallelLinear(4, 6, gather_output=False)
        for p in self.norm.parameters():
            sp.mark_as_sequence_parallel_parameter(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x)).square()


def cleared(level: str, looks: bool, keeps: bool, by_model: bool) -> None:
    """What was aside, or had added up in another dtype, is given up with the rest."""
    begin(**({"mp": 2} if level == "sequence" else {"sharding" if level == "sharding" else "dp": 2}))
    make = Sequence if level == "sequence" else lambda: net().bfloat16() if level == "wide" else net()
    model: Any = fleet.distributed_model(seeded(make), torch.float32 if level == "wide" else None)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for given_up in (False, True):
        optimizer.zero_grad()
        for i, x in enumerate(batches(3 if given_up else 1)[::-1]):
            if given_up and i == 2:
                (model if by_model else optimizer).zero_grad(set_to_none=not keeps)
            model(x.chunk(2)[torch.distributed.get_rank()].to(next(model.parameters()).dtype)).mean().backward()
            if looks:
                [p.grad for p in model.parameters()]
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        close(other.float(), one.float(), f"{level} {looks} {keeps} {by_model}", 1e-6)


def all_cleared(level: str) -> None:
    for looks, keeps, by_model in itertools.product((False, True), repeat=3):
        cleared(level, looks, keeps, by_model)


@pytest.mark.parametrize("level", ["dp", "sharding", "sequence", "wide"])
def test_what_is_given_up_is_gone(level: str) -> None:
    run_ranks(all_cleared, 2, level)
