"""Replays by the form of a call: what is given by position, by name, in tuples, lists and dicts, and what is no tensor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import onecard as oc

pytestmark = pytest.mark.usefixtures("replays_only")


def step(a: Any, b: Any = None, scale: Any = 1.0, **more: Any) -> Any:
    """Tells apart by its numbers where each tensor was given."""
    total: Any = a
    if isinstance(a, dict):
        total = sum(v * (2 if k == "p" else 3) for k, v in a.items())
    elif isinstance(a, tuple | list):
        total = a[0] * 5 + a[1] * (7 if isinstance(a, tuple) else 11)
    for name, value in more.items():
        total = total + value * len(name)
    total = total if b is None else total - b
    return {"sum": total * scale, "whole": isinstance(scale, int)}


def calls(x: Tensor, y: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of the same leaves, each in another form."""
    return [
        ((x,), {}),
        ((x, y), {}),
        ((x,), {"b": y}),
        ((), {"a": x, "b": y}),
        (((x, y),), {}),
        (([x, y],), {}),
        ((x, None), {}),
        (({"p": x, "q": y},), {}),
        (({"q": x, "p": y},), {}),
        ((x, y, 2.0), {}),
        ((x, y, 2), {}),
        ((x, y, True), {}),
        ((x, x), {}),
        ((x,), {"c": y}),
        ((x,), {"long": y}),
        ((x, y), {"c": y}),
    ]


def test_each_form_of_a_call_has_its_recording():
    ran: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return step(*args, **kwargs)

    static = oc.to_static(counted, limit=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is recorded anew is what is wanted
        for turn in range(4):
            for i, (args, kwargs) in enumerate(calls(torch.randn(3), torch.randn(3))):
                found, wanted = static(*args, **kwargs), step(*args, **kwargs)
                assert torch.equal(found["sum"], wanted["sum"]), (turn, i)
                assert found["whole"] == wanted["whole"], (turn, i)
            if turn == 1:
                before, made = len(ran), len(static.recordings)
    assert (len(ran), len(static.recordings)) == (before, made)  # later turns were replays


@pytest.mark.parametrize("scale", [2.0, -3.0])
def test_a_float_may_change_and_the_step_is_not_run(scale: float):
    ran = []

    @oc.to_static
    def scaled(x: Tensor, scale: float) -> Tensor:
        ran.append(scale)
        return x * scale

    for _ in range(2):
        scaled(torch.ones(2), 1.0)
    assert scaled(torch.ones(2), scale).tolist() == [scale, scale]
    assert len(ran) == 2


def test_a_step_that_returns_none_is_replayed():
    ran, state = [], torch.zeros(2)

    @oc.to_static
    def add(x: Tensor) -> None:
        ran.append(1)
        state.add_(x)

    for i in range(5):
        assert add(torch.full((2,), float(i))) is None
    assert state.tolist() == [10.0, 10.0]
    assert len(ran) == 2


def test_an_error_of_the_replay_is_not_taken_for_a_recording_that_does_not_fit():
    ran = []

    @oc.to_static
    def pick(table: Tensor, rows: Tensor) -> Tensor:
        ran.append(1)
        return table[rows]

    table, rows = torch.arange(4.0), torch.tensor([0, 3])
    for _ in range(3):
        assert pick(table, rows).tolist() == [0.0, 3.0]
    with pytest.raises(IndexError):
        pick(table, rows + 1)
    assert len(ran) == 2


def test_constants_that_the_step_writes_to_begin_anew():
    """What is made of Python's numbers and then written to was kept with what had been written."""

    def step(x):
        count, pair = torch.tensor(0.0), torch.tensor([0.0, 1.0])
        count += 1
        pair.mul_(3).add_(1)
        return x + count + pair

    recording = oc.record(step)(torch.zeros(2))
    assert torch.equal(recording(torch.zeros(2)), torch.tensor([2.0, 5.0]))
    assert torch.equal(recording(torch.zeros(2)), torch.tensor([2.0, 5.0]))


def test_microbatches_under_one_card_random_draw_the_batchs():
    """A replay within ``one_card_random`` drew a key for each key."""
    drop, layer = torch.nn.Dropout(0.5), torch.nn.Linear(3, 3, bias=False)

    def step(x):
        y = drop(x)
        layer(y).sum().backward()
        layer.weight.grad = None
        return y.detach()

    merged = oc.to_static(step, k_steps=2)
    with oc.one_card_random():
        merged(torch.ones(6, 3))
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            found = merged(torch.ones(6, 3))
            torch.manual_seed(seed)
            assert torch.equal(found, drop(torch.ones(6, 3)))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: [x]])
def test_an_argument_begins_to_take_gradients(form):
    """A saliency map: the caller reads ``x.grad`` after the step, and each call is given another x."""
    scale = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def trains(x):
        x = x[0] if isinstance(x, list) else x
        kept = x * 5  # before x takes gradients
        (scale * x.requires_grad_() ** 2 + kept).sum().backward()
        scale.grad = None
        return x

    def asks(x):
        x = x[0] if isinstance(x, list) else x
        return torch.autograd.grad((scale * x.requires_grad_() ** 2).sum(), x)[0]

    for plain in (trains, asks):
        static = oc.to_static(plain)
        for number in range(4):
            x, y = torch.tensor([1.0, number]), torch.tensor([1.0, number])
            expected, found = plain(form(x)), static(form(y))
            assert torch.equal(expected, found) and (found is y) == (expected is x)
            assert y.requires_grad and x.requires_grad and found.requires_grad == expected.requires_grad
            assert (y.grad is None) == (x.grad is None) and (x.grad is None or torch.equal(x.grad, y.grad))
        assert len(static.recordings) == 1
