"""What a step reads of Python while it is recorded is what it has to find again: else it is recorded anew, at every call."""

from __future__ import annotations

import io
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import habits_static_code  # noqa: F401  # each adds its own to ``HABITS``
import habits_static_containers  # noqa: F401
import habits_static_library  # noqa: F401
import pytest
import torch
from habits_static import BY_CHECKING, HABITS, Habit
from torch import Tensor

import onecard as oc
from onecard.comm.agree import sparse_check
from onecard.errors import RecordingError

CALLS = 6


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Recordings that check themselves would find at call 3 what a guard has missed."""
    if "told_by_call" not in request.node.name:
        monkeypatch.setattr(sparse_check.on, "here", False)


def plainly(x: Any) -> Any:
    """A result as lists of numbers, whatever holds them."""
    if isinstance(x, Tensor):
        return x.detach().tolist()
    if isinstance(x, dict):
        return {k: plainly(v) for k, v in x.items()}
    if isinstance(x, list | tuple | set):
        return [plainly(v) for v in x]
    if isinstance(x, types.FunctionType):
        return plainly(x())
    if hasattr(x, "__slots__"):
        return [plainly(getattr(x, k)) for k in x.__slots__]
    return plainly(vars(x)) if hasattr(x, "__dict__") else x


def called(make: Callable[[], Habit], static: bool) -> list[Any]:
    step, between = make()
    run = oc.to_static(step) if static else step
    found = []
    for i in range(CALLS):
        found.append(plainly(run(torch.arange(1.0, 4.0) + i)))
        between(i)
    return found


def outcome(make: Callable[[], Habit]) -> str:
    expected = called(make, static=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = called(make, static=True)
        except RecordingError as fault:
            return f"refused: {fault}"
    return "right" if found == expected else f"{found} in place of {expected}"


REFUSED = {
    "an_object_that_was_there_returned", "a_set_of_tensors_returned", "a_function_returned",
}  # fmt: skip


@pytest.mark.parametrize("name", HABITS)
def test_each_call_is_right_or_refused(name: str) -> None:
    said = outcome(HABITS[name])
    assert said.startswith("refused") if name in REFUSED else said == "right", said


def test_habits_are_many() -> None:
    assert len(HABITS) >= 100 and sys.gettrace() is None


@pytest.mark.parametrize("mininterval", [0.0, 0.01, 100.0])
def test_a_progress_bar_is_no_reason(mininterval: float) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=10, disable=False, file=io.StringIO(), mininterval=mininterval) as bar:

        @oc.to_static
        def step(x: Tensor) -> Tensor:
            bar.update(1)
            return x * 2

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(CALLS):
                step(torch.ones(3) + i)
    assert len(step.recordings) == 1


def test_a_debugger_and_a_measurement_of_coverage_go_on() -> None:
    """What was there as a trace sees the lines of the step as ever, and is there afterwards; the step is noted all the same."""
    lines, box = [], [1.0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is step.__code__ and event == "line":
            lines.append(frame.f_lineno)
        return trace if frame.f_code is step.__code__ else None

    def step(x: Tensor) -> Tensor:
        y = x * box[0]
        return y + 1

    run = oc.to_static(step)
    before = sys.gettrace()
    run(torch.ones(2))
    sys.settrace(trace)
    try:
        run(torch.ones(2))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert [n - step.__code__.co_firstlineno for n in lines] == [1, 2]
    assert [r.name for r in run._bound[0].seen.reads][-2:] == ["box", "box[0]"]


def test_the_words_name_value_and_line() -> None:
    box = types.SimpleNamespace(scale=2)
    run = oc.to_static(lambda x: x * box.scale)
    run(torch.ones(2)), run(torch.ones(2))
    box.scale = 3
    with pytest.warns(
        UserWarning, match=r"box.scale, which the step reads, was 2 and is 3 \(.*test_static_reads.py:\d+\)"
    ):
        run(torch.ones(2))


@pytest.mark.parametrize("name", BY_CHECKING)
def test_what_no_guard_knows_is_told_by_call_four(name: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        called(BY_CHECKING[name], static=True)
    assert any("call 3 does not do what was recorded" in str(w.message) for w in said)
