"""What a replay asks before it runs and what it leaves behind, each by itself: guards and effects that no loss shows."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from comparing import compared, never
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onecard as oc


class Trained:
    """A layer, its optimizer and a step, recorded or as it is."""

    def __init__(self, recorded: bool, first: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.first = first
        self.step: Any = oc.to_static(self._step) if recorded else self._step

    def _step(self, x: Tensor) -> Tensor:
        if self.first:
            self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if not self.first:
            self.optimizer.zero_grad()
        return loss.detach()


def gradient_left(made: Trained) -> None:
    made.net[0].weight.grad = torch.ones(4, 3)


def frozen(made: Trained) -> None:
    made.net[0].weight.requires_grad_(False)


def thawed(made: Trained) -> None:
    made.net[0].weight.requires_grad_(True)


@pytest.mark.parametrize("changes", [(gradient_left,), (frozen,), (frozen, thawed)])
def test_what_is_changed_between_calls(changes: Any) -> None:
    both = [Trained(recorded) for recorded in (True, False)]
    x = torch.randn(5, 3)
    with compared(never), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is recorded anew")
        for number in range(8):
            for made in both:
                if number in (4, 6) and number // 2 - 2 < len(changes):
                    changes[number // 2 - 2](made)
            losses = [made.step(x) for made in both]
            assert torch.equal(*losses), number
    for p, q in zip(both[0].net.parameters(), both[1].net.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_are_put_back_and_given_up() -> None:
    """After a replay each parameter has the gradient of the step; the one before it is given up before forward."""
    made, plain = Trained(True, True), Trained(False, True)
    x = torch.randn(5, 3)
    with compared(never):
        for _ in range(4):
            made.step(x), plain.step(x)
        for p, q in zip(made.net.parameters(), plain.net.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
        known = [weakref.ref(p.grad.untyped_storage()) for p in made.net.parameters()]
        with Looks(known) as looks:
            made.step(x)
    assert looks.alive == 0


class Looks(TorchDispatchMode):
    """How many of some tensors are there when the first operator runs."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.known, self.alive = known, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.alive < 0:
            self.alive = sum(each() is not None for each in self.known)
        return func(*args, **(kwargs or {}))


def test_arguments_that_are_one_tensor() -> None:
    """A step writes to one argument and reads another: whether they are one is a part of what is recorded."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        first = b * 2
        a.add_(1)
        return first + b * 2

    with compared(never), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is recorded anew")
        for order in ("one two", "two one"):
            static = oc.to_static(step)
            for kind in [*order.split(), *order.split()] * 2:
                x, y = torch.ones(3), torch.full((3,), 5.0)
                expected = step(x.clone(), y) if kind == "two" else step(z := x.clone(), z)
                got = static(x, y) if kind == "two" else static(x, x)
                assert torch.equal(got, expected), (order, kind)


def test_arguments_that_lie_in_one_memory() -> None:
    """Views of one tensor, one of which the step writes to: also where they were apart when it was recorded."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        first = b * 2
        a.add_(1)
        return first + b * 2

    with compared(never), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(is recorded anew|none fits)")
        static = oc.to_static(step)
        for kind in ["apart", "apart", "one"] * 2:
            both = [(x[1:], x[:3] if kind == "one" else torch.ones(3)) for x in (torch.ones(4), torch.ones(4))]
            assert torch.equal(static(*both[0]), step(*both[1])), kind


def test_a_value_beside_a_view_of_itself_is_not_overwritten() -> None:
    """An operator that could write where its first operand was, while the second reads there in another order."""

    def step(x: Tensor) -> Tensor:
        made = x * 2
        return made + made.t()

    static, x = oc.to_static(step), torch.randn(3, 3)
    with compared(never):
        for _ in range(4):
            assert torch.equal(static(x), step(x))


def test_each_microbatch_draws_its_own() -> None:
    """A number that is drawn, of which nothing depends on the batch: the result is the mean of two draws."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        noise = torch.rand(())
        ((x * weight).mean() * noise).backward()
        optimizer.step()
        return noise

    static, x = oc.to_static(step, k_steps=2), torch.ones(4, 3)
    static(x)
    with compared(never):
        for _ in range(2):
            torch.manual_seed(5)
            expected = (torch.rand(()) + torch.rand(())) / 2
            torch.manual_seed(5)
            assert torch.equal(static(x), expected)
