"""What shares memory with a parameter before a model is laid out: it goes on to share it, or the script is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import onecard as oc
from onecard.auto.first_batch import first_batch
from onecard.errors import PlanError
from onecard.tensor.dist_tensor import as_one_card
from onecard.testing import run_ranks

Habit = Callable[[nn.Linear, nn.Linear], Callable[[], float]]


def listed(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    held = [p.data for p in first.parameters()]
    return lambda: float(sum(x.sum() for x in held))


def written(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    held = first.weight.detach()

    def decay() -> float:
        held.mul_(0.9)
        return float(held.sum())

    return decay


def state(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    held = first.state_dict()
    return lambda: float(held["weight"].sum())


def array(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    held = first.weight.detach().numpy()
    return lambda: float(held.sum())


def vector(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    flat = torch.cat([p.detach().flatten() for p in first.parameters()])
    n = first.weight.numel()
    first.weight.data, first.bias.data = flat[:n].view_as(first.weight), flat[n:]

    def halve() -> float:
        flat.mul_(0.99)
        return float(flat.norm())

    return halve


def gradients(first: nn.Linear, second: nn.Linear) -> Callable[[], float]:
    flat = torch.zeros_like(first.weight).flatten()
    first.weight.grad = flat.view_as(first.weight)
    return lambda: float(flat.norm())


HABITS: dict[str, Habit] = {f.__name__: f for f in (listed, written, state, array, vector, gradients)}


def run(name: str, plan: oc.Plan | None) -> list[float]:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = HABITS[name](first, second)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    found = []
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        found += [float(loss.detach()), seen()]
    return found


def compared(name: str, plan: oc.Plan) -> tuple[float, list[str]]:
    """By how much numbers differ from one card's, and what was said. On a rank."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run(name, plan)
    wanted = run(name, None)
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, wanted, strict=True))
    return worst, [str(w.message) for w in said if "memory" in str(w.message)]


def planned(**fields: Any) -> oc.Plan:
    return oc.Plan(per_host=0, parameters="float32", compute="float32", **fields)


@pytest.mark.share(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", HABITS)
def test_what_is_whole_keeps_its_memory(name: str, zero: int) -> None:
    divided = zero and name == "gradients"
    for worst, said in run_ranks(compared, 2, name, planned(dp=2, zero=zero)):
        assert bool(said) == bool(divided)
        assert divided or worst < 1e-4


@pytest.mark.share(1)
@pytest.mark.parametrize("how", ["zero", "tp"])
@pytest.mark.parametrize("name", [name for name in HABITS if name != "gradients"])
def test_what_is_divided_is_told(name: str, how: str) -> None:
    plan = planned(dp=2, zero=3) if how == "zero" else planned(tp=2, placements=(("0.*", "tp: Shard(0)"),))
    for _, said in run_ranks(compared, 2, name, plan):
        assert any(line.startswith("0.weight: something else has this tensor's memory") for line in said)


def with_vector(plan: oc.Plan | None, again: bool) -> list[float]:
    """Gradients that are views of one vector, set once the model is laid out, or in each step; with a scheduler of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    found = []
    for step in range(4):
        flat.zero_()
        if again or not step:
            for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = part.view(p.shape)
        for _ in range(2):
            x = torch.randn(8, 4)
            loss = (model(x) - x).square().mean()
            loss.backward()
        flat.mul_(0.5 / flat.norm())
        optimizer.step()
        found += [float(loss.detach()), float(flat.norm())]
    return found


def both_with_vector(plan: oc.Plan, again: bool) -> float:
    found, wanted = with_vector(plan, again), with_vector(None, again)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.share(1)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_vector_of_gradients_stays_the_programs(zero: int, again: bool) -> None:
    assert max(run_ranks(both_with_vector, 2, planned(dp=2, zero=zero), again)) < 1e-5


def other_data(plan: oc.Plan | None) -> list[float]:
    """Averages in the parameters' place, other data after them: all of it is the program's, and stays what it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    found = list[float]()
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = [0.9 * p.data for p in model.parameters()]
        held = [p.data for p in model.parameters()]
        for p, mean in zip(model.parameters(), average, strict=True):
            p.data = mean
        found += [float(loss.detach()), float(model(x).detach().sum())]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())
        found.append(float(model(x).detach().sum()))
        as_one_card.here = True  # a program for one card knows of no mesh, and has the same on all ranks
        for p in model.parameters():
            p.data = torch.full(p.shape, 0.1)
        as_one_card.here = False
        found.append(float(model(x).detach().sum()))
        for p, old in zip(model.parameters(), held, strict=True):
            p.data = old
        found += [float(sum(t.double().abs().sum() for t in kept)) for kept in (average, held)]
    return found


def both_with_other_data(plan: oc.Plan) -> float:
    found, wanted = other_data(plan), other_data(None)
    return max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(found, wanted, strict=True))


@pytest.mark.share(1)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_other_data_in_a_parameters_place(zero: int) -> None:
    assert max(run_ranks(both_with_other_data, 2, planned(dp=2, zero=zero))) < 1e-5


class Interrupted(torch.optim.SGD):
    """Its first step ends in an error, before anything is updated."""

    begun = False

    def step(self, closure: Any = None) -> Any:
        if not self.begun:
            self.begun = True
            raise RuntimeError("interrupted")
        return super().step(closure)


def after_an_error(plan: oc.Plan | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    flat, found = torch.zeros(16), []
    model.weight.grad = flat.view(4, 4)
    for _ in range(3):
        x = torch.randn(8, 4)
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x).square().mean()
        loss.backward()
        with suppress(RuntimeError):
            optimizer.step()
        found.append(float(loss.detach()))
    return found


def both_after_an_error(plan: oc.Plan) -> float:
    found, wanted = after_an_error(plan), after_an_error(None)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_that_was_interrupted_gives_no_old_gradient_back(zero: int) -> None:
    assert max(run_ranks(both_after_an_error, 2, planned(dp=2, zero=zero))) < 1e-5


def fitted(name: str, stage: int) -> list[str]:
    """What an Engine says of a habit. On a rank."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = HABITS[name](first, second)
    strategy = oc.Strategy({"sharding": {"enable": True, "stage": stage}})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = oc.Engine(model, nn.MSELoss(), optimizer, strategy=strategy)
        engine.fit([(torch.randn(4, 4), torch.randn(4, 4))], verbose=0)
    seen()
    return [str(w.message) for w in said if "memory" in str(w.message)]


@pytest.mark.parametrize(("name", "stage", "told"), [("state", 1, 0), ("gradients", 2, 1), ("state", 3, 2)])
def test_an_engine_with_zero_says_it_too(name: str, stage: int, told: int) -> None:
    assert [len(said) for said in run_ranks(fitted, 2, name, stage)] == [told, told]


def own_copies(plan: oc.Plan) -> list[str]:
    """What is said of a model of which nobody holds anything but copies. On a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 4), nn.Identity())
    copies = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        oc.parallelize(model, optimizer, plan=plan)
    return [str(w.message) for w in said if copies]


def test_copies_are_no_reason_for_words() -> None:
    assert run_ranks(own_copies, 2, planned(dp=2, zero=3)) == [[], []]


# -- the first batch is looked at --------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    """Counts what it has given, and draws from sources of its own."""

    def __init__(self) -> None:
        self.given, self.numbers, self.legacy = 0, np.random.default_rng(1), np.random.RandomState(2)

    def __iter__(self) -> Any:
        for _ in range(4):
            self.given += 1
            yield torch.full((), self.given + self.numbers.random() + self.legacy.rand())


def loaders() -> dict[str, Any]:
    data, g = torch.arange(12.0), torch.Generator().manual_seed(1)
    return {
        "shuffled": DataLoader(data, 4, shuffle=True, generator=g),  # type: ignore[arg-type]
        "sampled": DataLoader(data, 4, sampler=torch.utils.data.RandomSampler(data, generator=g)),  # type: ignore[arg-type]
        "a stream": DataLoader(Stream(), 2),
        "a list": [torch.rand(2), torch.rand(2)],
    }


@pytest.mark.parametrize("name", ["shuffled", "sampled", "a stream", "a list"])
def test_a_loader_that_was_looked_at_gives_the_same(name: str) -> None:
    torch.manual_seed(0)
    wanted = [*loaders()[name]]
    torch.manual_seed(0)
    looked_at = loaders()[name]
    assert torch.equal(first_batch(looked_at, ValueError), wanted[0])
    torch.testing.assert_close([*looked_at], wanted, rtol=0, atol=0)


def test_what_is_read_once_is_refused() -> None:
    with pytest.raises(PlanError, match="generator can be read only once"):
        oc.parallelize(nn.Linear(2, 2), None, (x for x in [torch.ones(2, 2)]), "auto", loss=nn.MSELoss())


def traced(call: str) -> str:
    """What is said of a model that is exported where it lies on ranks."""
    model = nn.Linear(4, 2)
    oc.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=planned(dp=2))
    model(torch.ones(2, 4))
    try:
        torch.jit.trace(model, torch.ones(2, 4)) if call == "trace" else torch.jit.script(model)
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return ""


@pytest.mark.parametrize(("call", "kind"), [("trace", "DispatchError"), ("script", "AttributeError")])
def test_an_export_is_refused_with_words(call: str, kind: str) -> None:
    for said in run_ranks(traced, 2, call):
        assert said.startswith(f"{kind}: torch.jit.{call} of a model whose parameters lie on several ranks")
