"""A plain model in stages whose forward has to do with Python's objects: lists that it fills, counts, results in classes."""

from __future__ import annotations

import re
import types
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.errors import PlanError
from onecard.static.guards.held import HeldValues
from onecard.testing import run_ranks

FIRST = {"pp": 2, "microbatches": 2, "schedule": "F-then-B"}
SHAPES: list[Any] = []


@dataclass
class Output:
    value: Tensor
    skip: Tensor | None = None
    kind: str = "plain"


class Meter:
    def __init__(self) -> None:
        self.count = 0


class Noting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(6, 6), nn.Linear(6, 6)
        self.seen: dict[str, Any] = {"calls": 0}
        self.log: list[Any] = []
        self.meter, self.rows, self.table = Meter(), 0, None
        self.register_buffer("speed", torch.tensor(0.3))
        self.waves: Any = ()
        if kind == "weight norm":
            with warnings.catch_warnings(action="ignore"):
                nn.utils.weight_norm(self.a)
        if kind == "a list of a hook":
            self.a.register_forward_hook(lambda m, args, out: SHAPES.append(tuple(out.shape)))

    def forward(self, x: Any, given: Any = None) -> Any:
        h = self.a(x).tanh()
        if self.kind == "a count in a dict":
            self.seen["calls"] += 1
        elif self.kind == "a list":
            self.log.append("called")
        elif self.kind == "a count of an object":
            self.meter.count += 1
        elif self.kind == "how many rows":
            self.rows = len(x)
        elif self.kind == "a list that is given":
            given["aux"].append(1)
        elif self.kind == "a tensor that is given":
            x.mul_(2)
        elif self.kind == "a table":
            self.table = torch.linspace(0, 1, 6) if self.table is None else self.table
            h = h * self.table
        elif self.kind == "a table of a buffer":
            if len(self.waves) < x.shape[1]:
                self.waves = (torch.arange(x.shape[1]).float() * self.speed).cos()
            h = h * self.waves[: x.shape[1]]
        elif self.kind == "a value in an object":
            self.log = [Output(h)]
        elif self.kind == "a dataclass":
            return Output(self.b(h), h)
        elif self.kind == "a namespace":
            return types.SimpleNamespace(value=self.b(h), parts=[Output(h)])
        return self.b(h)


REFUSED = {
    "a count in a dict": r"it changes Noting.seen\['calls'\], once for each microbatch",
    "a list": "it changes Noting.log, once for each microbatch",
    "a count of an object": "it changes Meter.count, once for each microbatch",
    "a list of a hook": "it writes a number to SHAPES that is not the same for a microbatch",
    "a value in an object": r"Noting.log keeps a value of its forward, \[8, 6\], which would be one microbatch's",
    "how many rows": "it writes a number to Noting.rows that is not the same for a microbatch",
    "a list that is given": "it writes to a list or a dict that it is given",
    "a tensor that is given": r"it writes to a tensor that it is given, \[4, 6\]",
}


def _refused(kind: str) -> tuple[str, Any]:
    model, given = Noting(kind), {"aux": []}
    with oc.pretend(world_size=2, rank=1):
        oc.parallelize(model, plan=oc.Plan(**FIRST))
        try:
            model(torch.randn(8, 6), given)
        except PlanError as error:
            return str(error), (model.seen, model.log, model.meter.count, model.rows, given, SHAPES)
    return "", None


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_forward_writes_down_for_each_microbatch_is_refused_and_taken_back(kind):
    said, left = run_ranks(_refused, 1, kind)[0]
    assert re.search(REFUSED[kind], said), said
    assert left == ({"calls": 0}, [], 0, 0, {"aux": []}, [])


def _of(out: Any) -> Any:
    if isinstance(out, types.SimpleNamespace):
        assert type(out.parts[0]) is Output
        return out.value + out.parts[0].value.square()
    return out.value + out.skip.sin() if isinstance(out, Output) else out


def _laid_out(model: nn.Module, plan: dict[str, Any] | None) -> torch.optim.Optimizer:
    """A model by a plan, if there is one; its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if plan:
        oc.parallelize(model, optimizer, plan=oc.Plan(**plan))
    return optimizer


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for i in range(3):
        loss = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(i))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trained(kind: str, plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = Noting(kind)
    optimizer = _laid_out(model, plan)
    losses = []
    for i in range(3):
        draw = torch.Generator().manual_seed(i)
        out = _of(model(torch.randn(8, 6, generator=draw)))
        if kind == "a plain gradient":
            out.backward(torch.randn(8, 6, generator=draw))
        else:
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.detach().square().mean().item())
    return losses


KEPT = ["a table", "a table of a buffer", "a dataclass", "a namespace", "a plain gradient", "weight norm"]


@pytest.mark.parametrize("kind", KEPT)
def test_it_gives_back_objects_and_is_given_plain_gradients(kind):
    expected = _trained(kind, None)
    for found in run_ranks(_trained, 2, kind, FIRST):
        assert found == pytest.approx(expected, rel=1e-5)


class Adding(nn.Module):
    """A block that hands what it adds to the loss to a list, as it may have been given it by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Any, losses: list[Any], fixed: Any = None) -> Any:
        h = self.up(x).tanh()
        losses.append(h.square().mean())
        if fixed is not None:
            fixed.mul_(0.5)
        return h


class Whole(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes, self.blocks = writes, nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x: Any, losses: list[Any]) -> Any:
        fixed = None
        for block in self.blocks:
            x = block(x, losses, fixed)
            if self.writes:
                fixed = x.detach().clone() if fixed is None else fixed
        return x


def _filled(plan: dict[str, Any] | None, writes: bool = False) -> Any:
    torch.manual_seed(0)
    model = Whole(writes)
    optimizer = _laid_out(model, plan)
    found = []
    for i in range(3):
        losses: list[Any] = []
        try:
            out = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), losses)
        except PlanError as error:
            return str(error)
        loss = out.square().mean() + sum(losses)
        found += [loss.item(), len(losses)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_list_that_blocks_of_all_stages_fill_is_the_programs_own(recompute):
    expected = _filled(None)
    for found in run_ranks(_filled, 2, {"pp": 2, "recompute": recompute}):
        assert found == pytest.approx(expected, rel=1e-5)


def _normed(plan: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(4)))})
    model.forward = lambda x: model["blocks"](x).tanh()
    return _losses(model, _laid_out(model, plan))


def test_weights_that_hooks_make_run_again():
    """The graph of a weight that a hook puts into an attribute keeps what a checkpoint keeps: no value that is put aside."""
    expected = _normed(None)
    for found in run_ranks(_normed, 2, FIRST | {"recompute": "full"}):
        assert found == pytest.approx(expected, rel=1e-5)


def _spectral(plan: dict[str, Any] | None, begun: bool) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.utils.spectral_norm(nn.Linear(6, 6)) for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    if begun:
        model(torch.randn(4, 6))
    optimizer = _laid_out(model, plan)
    return [layers[0].weight.detach().norm().item(), *_losses(model, optimizer)]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("plan", [{"pp": 2}, {"dp": 2, "zero": 3}])
def test_spectral_norm_of_old(plan, begun):
    """Its ``weight`` has the memory of ``weight_orig``, or its graph: a warning said that it would not see what is trained."""
    expected = _spectral(None, begun)
    for found in run_ranks(_spectral, 2, plan, begun):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_block_that_runs_again_writes_to_nothing_of_another_stage():
    for said in run_ranks(_filled, 2, {"pp": 2, "recompute": "full"}, True):
        assert "Adding writes to a tensor that it is given, [8, 6], which comes from another stage" in said


def test_changes_of_what_is_held_have_their_place():
    model, names, counted = Noting("a list"), {"b": 1, "a": [2]}, {"calls": 0}

    def hook(*given: Any) -> None:
        counted["calls"] += 1

    held = HeldValues([model, names, hook])
    assert held.changes() == {}
    model.seen["calls"] = 5
    hook()
    model.log.append(1)
    model.meter.count = 2
    names["a"].append(3)
    names["c"] = names.pop("b")
    found = {held.path(key): pair for key, pair in held.changes().items()}
    assert found.pop("Noting.seen['calls']") == (0, 5)
    assert found.pop("Noting.log") == ((), (1,))
    assert found.pop("Meter.count") == (0, 2)
    assert found.pop("counted['calls']") == (0, 1)
    assert {*found} == {"a dict['a']", "a dict['b']", "a dict['c']"}
    held.all_back()
    assert held.changes() == {}
    assert [*names.items()] == [("b", 1), ("a", [2])]


class Hooked(Noting):
    """A hook that is linear in the gradient of an activation."""

    def forward(self, x):
        h = self.a(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.b(h)


def _hooked(microbatches: int) -> torch.Size:
    model = Hooked("a hook")
    with oc.pretend(world_size=2, rank=1):
        oc.parallelize(model, plan=oc.Plan(**{**FIRST, "microbatches": microbatches}))
        return model(torch.randn(8, 6)).shape


@pytest.mark.parametrize("microbatches", [4, 8])
def test_what_is_linear_in_gradients_may_be_in_microbatches_of_one_row(microbatches):
    assert run_ranks(_hooked, 1, microbatches)[0] == (8, 6)
