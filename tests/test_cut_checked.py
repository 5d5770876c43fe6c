"""Steps that are cut into stages check themselves: what no guard sees is told within a few calls, on all ranks at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.run.rechecked import next_sketch
from onecard.testing import run_ranks

PLAN = {"pp": 2, "microbatches": 2}
Factor = Callable[[], float]


class Net(nn.Module):
    """Multiplies by a number that Python finds."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 12), nn.Linear(12, 3))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.factor()


def steps(factor: Factor, count: int) -> tuple[int, list[str]]:
    """How many steps there were, and what was told, the last refusal with it."""
    net = Net(factor)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, plan=oc.Plan(**PLAN))
    x, y, done = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3, 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for done in range(count):  # noqa: B007
                run(x, y)
            end = []
        except RecordingError as error:
            end = [f"refused: {error}"]
    return done, [str(w.message) for w in told if "does not do what was recorded" in str(w.message)] + end


def numbers(found: Sequence[float]) -> SimpleQueue[float]:
    """What comes of it one after the other; nothing says what is still in it."""
    made: SimpleQueue[float] = SimpleQueue()
    for x in found:
        made.put(x)
    return made


def of_a_queue() -> Any:
    later = numbers(np.random.default_rng(0).random(100).tolist())
    return steps(lambda: later.get(), 40)


def of_one_rank() -> Any:
    later = numbers([0.0] * 5 + [1.0] * 95)  # two recordings look twice each, at the batch and at a part of it
    return steps(lambda: 0.5 + later.get() * oc.get_rank(), 40)


def of_one_rank_from_the_first() -> Any:
    return steps(lambda: 0.25 if oc.get_rank() == 1 else 0.5, 1)


def nothing() -> Any:
    return steps(lambda: 0.5, 70)


@pytest.mark.proof
@pytest.mark.parametrize("program", [of_a_queue, of_one_rank])
def test_what_python_is_given_is_told_and_then_refused(program: Callable[[], Any]) -> None:
    for rank, (done, told) in enumerate(run_ranks(program, 2)):
        assert done < 16
        assert len(told) == 2
        assert told[1].startswith("refused: ")
        end = "A step that is cut into stages cannot run as it is" if program is of_a_queue else "the program differs"
        assert end in told[1]
        if program is of_a_queue or rank == 1:
            assert "other was " in told[0]
            assert "later.get()" in told[0] or "self.factor()" in told[0]
        else:
            assert "another rank has found it" in told[0]


@pytest.mark.proof
def test_a_number_of_one_rank_alone_is_refused_when_it_is_recorded() -> None:
    for done, (told,) in run_ranks(of_one_rank_from_the_first, 2):
        assert done == 0
        assert "the program differs" in told
        assert "rank 0: mul" in told
        assert "given [0.5]" in told
        assert "given [0.25]" in told


def of_another_rate() -> list[str]:
    """What is said where rank 1 alone lowers its rate after two steps, and then where it alone changes a flag."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    flags = {"twice": False}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y) * (2 if flags["twice"] else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, plan=oc.Plan(**PLAN))
    x, y = torch.ones(8, 6), torch.arange(8) % 3
    found = [f"no fault: {run(x, y).item() > run(x, y).item()}"]
    for rate, twice in ((0.25, False), (0.5, True)):
        if oc.get_rank() == 1:
            optimizer.param_groups[0]["lr"], flags["twice"] = rate, twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(f"nothing was said: {run(x, y)}")
            except RecordingError as error:
                found.append(str(error))
    return found


def test_a_rate_or_a_flag_of_one_rank_alone_is_refused_on_all_before_anything_is_sent() -> None:
    first, second = run_ranks(of_another_rate, 2)
    assert first == second
    begun, rate, flag = first
    assert begun == "no fault: True"
    assert "['lr'] is 0.5 on rank 0, 0.25 on rank 1" in rate
    assert "given [1]" in flag and "given [2]" in flag


@pytest.mark.proof
def test_what_changes_nothing_is_not_told() -> None:
    for done, told in run_ranks(nothing, 2):
        assert (done, told) == (69, [])


def test_calls_at_which_a_step_is_written_down_once_more() -> None:
    calls = [2]
    while calls[-1] < 10_000:
        calls.append(next_sketch(calls[-1]))
    assert calls[1:] == [3, 8, 64, 512, 4096, 8192, 12288]
