"""The habits of ``habits_static`` on two ranks: the tensor is cut over them, and each rank reads Python for itself."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from habits_static import HABITS, Habit
from test_static_reads import CALLS, REFUSED, plainly

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CHOSEN = [name for i, name in enumerate(sorted(set(HABITS) - REFUSED)) if i % 2 == 0]


def whole(x: Any) -> Any:
    """A result with its distributed tensors gathered."""
    return torch.utils._pytree.tree_map(lambda v: oc.unshard(v) if isinstance(v, oc.DistTensor) else v, x)


def called(habit: Habit, mesh: oc.ProcessMesh, static: bool) -> list[Any]:
    step, between = habit
    weight = oc.shard_tensor(torch.ones(4), mesh, [oc.Replicate()])

    def summed(x: torch.Tensor) -> Any:
        return step(x), (x * weight).sum()  # a message beside what the habit does

    run = oc.to_static(summed) if static else summed
    found = []
    for i in range(CALLS):
        x = oc.shard_tensor(torch.arange(1.0, 5.0) + i, mesh, [oc.Shard(0)])
        found.append(plainly(whole(run(x))))
        between(i)
    return found


def outcomes(names: list[str]) -> dict[str, str]:
    """What became of each habit."""
    mesh, found = oc.ProcessMesh([0, 1], ["dp"]), {}
    for name in names:
        gc.collect()  # what the recordings before have left in cycles, which the next ones would look at
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = called(HABITS[name](), mesh, static=False)
            except Exception as fault:  # no habit of distributed tensors
                found[name] = f"void: {type(fault).__name__}"
                continue
            try:
                given = called(HABITS[name](), mesh, static=True)
                found[name] = "right" if given == expected else f"wrong: {given} in place of {expected}"
            except RecordingError as fault:
                found[name] = f"refused: {fault}"
    return found


@pytest.mark.proof
def test_each_call_is_right_or_refused_on_two_ranks() -> None:
    first, second = run_ranks(outcomes, 2, CHOSEN)
    assert first == second
    assert not {name: said for name, said in first.items() if said.startswith("wrong")}
    assert sum(said == "right" for said in first.values()) >= 60
