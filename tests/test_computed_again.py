"""Forwards that run again in backward: what they change in Python, and copies of their modules."""

from __future__ import annotations

import copy
import inspect
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.fleet.utils import recompute, recompute_sequential
from onecard.testing import run_ranks
from onecard.train.modules.python_state import PythonState, _found
from onecard.train.modules.second_run import run_again_in_backward


class Counting(nn.Module):
    """An attribute says how strongly a branch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.layer(x)) / self.calls


class Listing(Counting):
    """A list and a dict of its own, that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.table, self.last = list[float](), dict[str, int](), deque[int](maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        self.table["n"] = self.table.get("n", 0) + 1
        self.last.append(len(self.seen))
        return x + torch.tanh(self.layer(x)) / (len(self.seen) + self.table["n"] + sum(self.last))


class Cache:
    """As transformers' of keys and values: an object in the arguments."""

    def __init__(self) -> None:
        self.keys = list[Tensor]()

    def update(self, i: int, x: Tensor) -> Tensor:
        if len(self.keys) <= i:
            self.keys.append(x)
        else:
            self.keys[i] = torch.cat([self.keys[i], x])
        return self.keys[i]


class Cached(Counting):
    def forward(self, x: Tensor, cache: Any = None, i: int = 0) -> Tensor:  # type: ignore[override]
        keys = cache.update(i, self.layer(x))
        return x + torch.softmax(x @ keys.T, -1) @ keys


class Drawing(Counting):
    """Numbers of a generator of its own, of Python and of numpy; arrays, slots and tensors that count."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.own = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.array, self.slot, self.number = np.zeros(1), Slotted(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.array += 1
        self.slot.n += 1
        self.number += 1
        f = torch.rand((), generator=self.generator) + random.random() + np.random.rand() + self.own.random()
        return x + torch.tanh(self.layer(x) * f) / (float(self.array[0]) + self.slot.n + self.number.item())


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Net(nn.Module):
    def __init__(self, kind: type[Counting]) -> None:
        super().__init__()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.blocks, self.head = nn.ModuleList([kind() for _ in range(3)]), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for i, block in enumerate(self.blocks):
            x = block(x, cache, i) if isinstance(block, Cached) else block(x)
        y: Tensor = self.head(x)
        return y


def _trained(net: nn.Module) -> list[float]:
    opt, draws, seen = torch.optim.SGD(net.parameters(), 0.1), torch.Generator().manual_seed(1), list[float]()
    for _ in range(3):
        net(torch.randn(4, 8, generator=draws)).square().mean().backward()
        seen.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        opt.step()
        opt.zero_grad()
    return seen


def _by_recompute(net: Any) -> None:
    for block in net.blocks:
        forward = block.forward
        block.forward = lambda *given, forward=forward: recompute(forward, *given)


HOW: dict[str, Callable[[Any], None]] = {
    "a plan's": lambda net: [run_again_in_backward(block) for block in net.blocks][:0] and None,
    "fleet's": _by_recompute,
}


@pytest.mark.share(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Counting, Listing, Cached, Drawing])
def test_the_second_run_begins_from_what_the_first_one_began_from(kind: type[Counting], how: str) -> None:
    plain = Net(kind)
    wanted, again = _trained(plain), Net(kind)
    HOW[how](again)
    assert _trained(again) == pytest.approx(wanted, rel=1e-6)
    for a, b in zip(plain.blocks, again.blocks, strict=True):
        assert [a.calls, getattr(a, "seen", 0), getattr(a, "table", 0)] == [
            b.calls, getattr(b, "seen", 0), getattr(b, "table", 0)
        ]  # fmt: skip


class Averaging(Counting):
    """A buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(self.layer(x)) - self.mean


FIRST, SECOND = Counting(), Averaging()


def _of_the_file(x: Tensor) -> Tensor:
    y: Tensor = FIRST(x) + SECOND(x)
    return y


@pytest.mark.parametrize("way", ["closure", "file", "sequential", "nested"])
def test_modules_that_a_function_calls(way: str) -> None:
    global FIRST, SECOND
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        FIRST, SECOND = Counting(), Averaging()
        first, second = FIRST, SECOND

        def run(x: Tensor, first: Any = first, second: Any = second) -> Tensor:
            y: Tensor = first(x) + second(x)
            return y

        def inner(x: Tensor, run: Any = run, again: bool = again) -> Any:
            return recompute(run, x) if again else run(x)

        calls: dict[str, Callable[[Tensor], Any]] = {
            "closure": lambda x: first(x) + second(x),  # noqa: B023
            "file": _of_the_file,
            "sequential": lambda x: second(first(x)),  # noqa: B023
            "nested": inner,
        }
        draws, seen = torch.Generator().manual_seed(1), list[float]()
        for _ in range(3):
            x = torch.randn(4, 8, generator=draws)
            if way == "sequential" and again:
                y = recompute_sequential({"segments": 1}, [first, second], x)
            else:
                y = recompute(calls[way], x) if again else calls[way](x)
            y.square().mean().backward()
            seen += [y.sum().item(), first.layer.weight.grad.sum().item(), second.layer.weight.grad.sum().item()]
        found.append((seen, first.calls, second.mean.sum().item()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5) and found[1][1:] == pytest.approx(found[0][1:], rel=1e-5)


def test_what_libraries_count_is_theirs() -> None:
    """A group in an attribute counts its messages, whoever sends them."""
    block = Counting()
    block.mesh = oc.ProcessMesh([0], ["dp"])  # type: ignore[assignment]
    block.device = torch.device("cpu")  # type: ignore[assignment]
    assert {type(x) for x in _found([block, *block.children()], ())} == {Counting, nn.Linear}


def test_a_graph_that_is_kept_begins_anew_each_time() -> None:
    net = Net(Counting)
    HOW["a plan's"](net)
    loss = net(torch.randn(4, 8)).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, net.parameters(), strict=True) if p.grad is not None)


def test_what_is_not_changed_is_not_kept() -> None:
    config = {"width": 8, "names": ["a"]}
    block = Counting()
    block.config = config  # type: ignore[assignment]
    state = PythonState([block], (config, [1, 2]))
    block.calls += 1
    state.keep_changed()
    assert [x for x, _ in state._before] == [block]
    state.begin()()
    assert block.calls == 1 and block.config is config


def test_a_copy_has_a_forward_of_its_own() -> None:
    """As of an average of weights: by a closure its forward would be the first one's."""
    net = Net(Counting)
    HOW["a plan's"](net)
    average = copy.deepcopy(net)
    with torch.no_grad():
        for p in average.parameters():
            p.zero_()
    assert average(torch.randn(4, 8)).abs().max() == 0
    assert average.blocks[0].forward.module is average.blocks[0]
    assert [*inspect.signature(average.blocks[0].forward).parameters] == ["x"]


def planned() -> list[float]:
    torch.manual_seed(0)
    net = Net(Counting)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    oc.parallelize(net, opt, plan=oc.Plan(dp=2, recompute="full"))
    draws, seen = torch.Generator().manual_seed(1), list[float]()
    for _ in range(3):
        net(torch.randn(4, 8, generator=draws)).square().mean().backward()
        seen.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        opt.step()
        opt.zero_grad()
    return seen


def test_a_plan_that_computes_blocks_again() -> None:
    assert run_ranks(planned, 2)[0] == pytest.approx(_trained(Net(Counting)), rel=1e-5)
