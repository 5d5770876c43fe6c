"""What a step reads of Python while it is recorded is what it has to find again: else it is recorded anew, at every call."""

from __future__ import annotations

import io
import sys
import types
import warnings
from collections.abc import Callable
from operator import is_
from typing import Any

import habits_static_beside as beside  # each adds its own to ``HABITS``
import habits_static_code  # noqa: F401  # each adds its own to ``HABITS``
import habits_static_containers  # noqa: F401
import habits_static_instructions  # noqa: F401
import habits_static_library  # noqa: F401
import habits_static_of_c  # noqa: F401
import pytest
import torch
from habits_static import BY_CHECKING, HABITS, Habit
from torch import Tensor

import onecard as oc
from onecard.comm.agree import sparse_check
from onecard.errors import RecordingError
from onecard.static.code.source import Source
from onecard.static.guards.guard import LOOKED_UP, Guard
from onecard.static.guards.lines import checks
from onecard.static.guards.lookup import ABSENT, Place, now_at
from onecard.static.guards.seen import Seen
from onecard.static.guards.unchanged import copied, differs, is_still, kept
from onecard.static.step.step import MISS

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


@pytest.mark.parametrize("make", beside.TOLD)
def test_what_nobody_can_look_into_is_told(make: Callable[[], tuple[Callable[[Tensor], Tensor], str]]) -> None:
    step, said = make()
    run = oc.to_static(step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.ones(3))
    words = [str(w.message) for w in told if "every replay repeats" in str(w.message)]
    assert len(words) == bool(said) and all(said in text and "habits_static_beside.py" in text for text in words)


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
    assert [g.name for g in run._bound[0].seen.guards if g.place.kind in LOOKED_UP][-2:] == ["box", "box[0]"]


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


class _Slotted:
    """An object whose only attribute is a slot."""

    __slots__ = ("x",)
    of_class = 1


def _guarded() -> dict[str, tuple[Place, Any, Callable[[], object]]]:
    """For each kind of guard where it looks, what must be there, and what changes that."""
    holder, x, listed, cell = {"a": 1}, _Slotted(), [1], types.CellType(1)
    x.x = 1

    def called(n: int = 1) -> int:
        return n

    return {
        "entry": (Place("entry", holder, "a", holder), 1, lambda: holder.update(a=2)),
        "an entry that was not there": (Place("entry", holder, "b", holder), ABSENT, lambda: holder.update(b=2)),
        "class": (Place("class", _Slotted, "of_class", _Slotted), 1, lambda: setattr(_Slotted, "of_class", 2)),
        "slot": (Place("slot", x, vars(_Slotted)["x"], x), 1, lambda: setattr(x, "x", 2)),
        "cell": (Place("cell", cell, "x", cell), 1, lambda: setattr(cell, "cell_contents", 2)),
        "whole": (Place("whole", listed, None, listed), (1,), lambda: listed.append(2)),
        "answer": (Place("answer", listed.copy, None, listed), kept([1]), lambda: listed.append(2)),
        "code": (Place("code", called, "__defaults__", called), (1,), lambda: setattr(called, "__defaults__", (2,))),
    }


@pytest.mark.parametrize("kind", _guarded())
def test_a_guard_is_asked_and_said_alike(kind: str) -> None:
    """The compiled lines and the words are two readers of one value: where one sees a change, so does the other."""
    place, must, change = _guarded()[kind]
    must = getattr(place.holder, place.key) if place.kind == "code" else must
    seen = Seen(lambda x: False, lambda x: None)
    seen.guards.append(Guard(place, must, "that", "file.py:1"))
    source = Source(MISS=MISS, is_=is_, differs=differs, now_at=now_at, is_still=is_still)
    asked = source.function(source.code(""), [*checks(seen, source), source.code("return")])
    assert asked() is None and seen.difference() == ""
    change()
    assert asked() is MISS and seen.difference().startswith("that, which the step ")


def test_a_dict_by_parameters_is_compared_by_them():
    """A tensor as a key compares elements: "Boolean value of Tensor with more than one value is ambiguous"."""
    net = torch.nn.Linear(4, 4)
    slow = {p: p.detach().clone() for p in net.parameters()}

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, s in slow.items():
                p -= 0.1 * p.grad
                p.grad = None
                s.lerp_(p, 0.5)
        return loss.detach()

    run = oc.to_static(step)
    losses = [run(torch.ones(2, 4)).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and len(run.recordings) == 1
    held = copied(slow)
    assert is_still(slow, held) and not is_still({torch.nn.Parameter(p): s for p, s in slow.items()}, held)
