"""What a step reads of Python while it is recorded is what it has to find again: else it is recorded anew, at every call."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from habits_static import HABITS, Habit
from torch import Tensor

import onecard as oc
from onecard.errors import RecordingError

CALLS = 6


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
