"""What a recorded step does to what it is given: containers that it fills, tensors that it writes to, one tensor given twice."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks


def _sets(carry: Any) -> Tensor:
    carry["h"] = carry["h"] * 2
    return carry["h"].sum()


def _counts(carry: Any) -> Tensor:
    carry["n"] = carry["n"] + 1.0
    return carry["h"].sum() * carry["n"]


def _appends(carry: Any) -> Tensor:
    carry.append(carry[-1] * 2)
    return carry[-1].sum()


def _replaces(carry: Any) -> Tensor:
    carry[0] = carry[0] * 2
    return carry[0].sum()


FILLS: dict[str, tuple[Callable[[Any], Tensor], Callable[[], Any], str]] = {
    "dict": (_sets, lambda: {"h": torch.ones(2)}, r"sets argument 0\['h'\]"),
    "ordered": (_sets, lambda: OrderedDict(h=torch.ones(2)), r"sets argument 0\['h'\]"),
    "number": (_counts, lambda: {"h": torch.ones(2), "n": 0.0}, r"sets argument 0\['n'\]"),
    "list": (_replaces, lambda: [torch.ones(2)], "changes the list argument 0"),
    "longer list": (_appends, lambda: [torch.ones(2)], "changes the list argument 0"),
    "queue": (_appends, lambda: deque([torch.ones(2)], maxlen=3), "changes the deque argument 0"),
    "nested": (lambda c: _sets(c[0]), lambda: [{"h": torch.ones(2)}], r"sets argument 0\[0\]\['h'\]"),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_container_that_the_step_fills_is_told(name: str) -> None:
    """Replays left the caller's as it was, without a word."""
    fill, make, said = FILLS[name]
    step, carry = oc.to_static(lambda c: fill(c)), make()
    step(carry)
    with pytest.warns(UserWarning, match=f"{said}, which it is given, .* return it, and put it there outside"):
        step(carry)


def _pops(batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return (batch["x"] * labels).sum()


def _keeps(batch: Any) -> Tensor:
    for key in batch:
        batch[key] = batch[key].to("cpu")  # the same tensor
    return batch["x"].sum()


@pytest.mark.parametrize("of", [_pops, _keeps])
@pytest.mark.filterwarnings("error")
def test_what_is_taken_out_or_put_back_is_let_be(of: Callable[[Any], Tensor]) -> None:
    step = oc.to_static(lambda batch: of(batch))
    for i in range(4):
        assert step({"x": torch.full((2,), float(i)), "labels": torch.ones(2)}).item() == 2 * i
    assert len(step.recordings) == 1


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, h: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x + beside, h)
        return self.head(h), h


def _written(plan: dict[str, Any] | None) -> list[float]:
    """Losses and states of a step that writes its state into an argument, and into one that is given twice."""
    torch.manual_seed(0)
    model = _Cell()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)

    def step(x: Tensor, again: Tensor, y: Tensor, h: Tensor) -> Tensor:
        optimizer.zero_grad()
        x.mul_(0.5)
        out, new = model(x, h.clone(), again)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            h.copy_(new)
        return loss.detach()

    run: Any = step if plan is None else oc.to_static(step, plan=oc.Plan(**plan))
    h, found = torch.zeros(8, 6), list[float]()
    for i in range(7):
        draw = torch.Generator().manual_seed(i)
        x, y = torch.randn(8, 4, generator=draw), torch.randint(3, (8,), generator=draw)
        found += [run(x, x, y, h).item(), h.abs().sum().item(), x.sum().item()]
    return found


@pytest.mark.parametrize("plan", [{}, {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}], ids=str)
def test_what_a_step_writes_into_what_it_is_given_under_a_plan(plan: dict[str, Any]) -> None:
    """Replays wrote into parts, and the caller's tensors stayed as they were."""
    wanted = _written(None)
    for found in run_ranks(_written, plan.get("dp", 1), plan):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_keywords_of_a_partial_are_looked_at() -> None:
    scaled = functools.partial(lambda x, k: x * k, k=2.0)
    step = oc.to_static(lambda x: scaled(x).sum())
    x = torch.ones(2)
    assert [step(x).item() for _ in range(3)] == [4.0] * 3
    scaled.keywords["k"] = 5.0
    with pytest.warns(UserWarning, match="holds other entries"):
        assert step(x).item() == 10.0
    assert step(x).item() == 10.0


def _deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on)


def _precision(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


def _anomaly(on: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(on)


SWITCHES = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, _deterministic),
    "precision": (lambda: torch.get_float32_matmul_precision() == "high", _precision),
    "anomaly": (torch.is_anomaly_enabled, _anomaly),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_the_process_that_a_step_asks(name: str) -> None:
    is_on, switch = SWITCHES[name]
    step = oc.to_static(lambda x: x * (2.0 if is_on() else 1.0))
    x = torch.ones(())
    try:
        assert [step(x).item() for _ in range(3)] == [1.0] * 3
        switch(True)
        with pytest.warns(UserWarning, match="which the step reads, was"):
            assert step(x).item() == 2.0
    finally:
        switch(False)
