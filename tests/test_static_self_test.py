"""Recordings on a Python that tells less of what runs than those that are known: none is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.guards import chains, ran, self_test


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found of this Python, and of code, is of one test."""
    ran._acts.cache_clear()
    self_test.unseen.cache_clear()
    yield
    monkeypatch.undo()
    ran._acts.cache_clear()
    self_test.unseen.cache_clear()


def test_this_python_tells_all() -> None:
    assert not self_test.unseen() and len(self_test.WANTED) >= 20


@pytest.mark.parametrize(
    "instruction, missed",
    [
        ("LOAD_ATTR", "CELL.by"),
        ("LOAD_DEREF", "captured.by"),
        ("MATCH_CLASS", "CELL.matched"),
        ("LOAD_GLOBAL", "SCALE"),
    ],
)
def test_an_instruction_that_is_not_known_is_missed(
    instruction: str, missed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(chains._KNOWN, instruction)
    if instruction == "LOAD_ATTR":
        monkeypatch.delitem(chains._KNOWN, "LOAD_METHOD", raising=False)
    assert missed in self_test.unseen()


def test_a_trace_without_instructions_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first trace of a function on Python 3.12 and 3.13, where it is asked for too late."""
    monkeypatch.setattr(ran.Ran, "_act", lambda self, frame, acts: None)
    step = oc.to_static(lambda x: x * 2)
    with pytest.raises(RecordingError, match=r"does not tell what a step looks up \(.*CELL.by.*Python 3.11 to 3.14"):
        for _ in range(2):  # the first call of a step may change what it reads, and is not written down
            step(torch.ones(2))
