"""Programs that touch what only other stages of a pipeline have: each is told, none reads memory that is not there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cut_programs import K
from test_cut_beside import Program

import onecard as oc
from onecard.errors import StageError
from onecard.fleet.gradients import hooks
from onecard.testing import run_ranks
from onecard.train.absent import let_go
from onecard.train.shard import is_elsewhere

HABITS: dict[str, Callable[[Any], Any]] = {
    "list operators": lambda p: torch._foreach_mul([q.detach() for q in p.model.parameters()], 2.0),
    "list norms": lambda p: torch._foreach_norm(list(p.model.parameters())),
    "a vector of all": lambda p: torch.nn.utils.parameters_to_vector(p.model.parameters()),
    "a number": lambda p: sum(q.sum().item() for q in p.model.parameters()),
    "forward by hand": lambda p: p.model(torch.zeros(2, 3, dtype=torch.int64)),
    "a copy": lambda p: copy.deepcopy(p.model),
    "numpy": lambda p: [q.detach().numpy() for q in p.model.parameters()],
    "torch.save": lambda p: torch.save(p.model.state_dict(), io.BytesIO()),
    "torch.save of states": lambda p: torch.save(p.optimizer.state_dict(), io.BytesIO()),
    "an average": lambda p: [q.detach().clone() for q in p.model.parameters()],
    "drawn anew": lambda p: [q.data.normal_() for q in p.model.parameters()],
    "other data": lambda p: [setattr(q, "data", torch.ones(q.shape)) for q in p.model.parameters() if is_elsewhere(q)],
    "another dtype": lambda p: p.model.double(),
}


def _told() -> dict[str, str]:
    program = Program(oc.Stages(K))
    before = program.trained(range(2))
    found = {"before": str(before)}
    for name, habit in HABITS.items():
        if name == "drawn anew":  # the first ones are, until one that is not here
            found["after"] = str(program.trained(range(2, 3)))
        with torch.no_grad():
            try:
                habit(program)
                found[name] = "nothing was said"
            except StageError as error:
                found[name] = str(error)
    assert "which stage" in repr([*program.model.parameters()])
    absent = [p for p in program.model.parameters() if is_elsewhere(p)]
    assert absent and all(isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf for p in absent)
    return found


def test_every_habit_is_told():
    for rank, found in enumerate(run_ranks(_told, 2, timeout=120.0)):
        silent = {name: said for name, said in found.items() if name in HABITS and "of the pipeline ha" not in said}
        assert not silent
        assert f"on rank {rank}, was given back" in found["a number"]
        assert "test_cut_absent.py" in found["a number"] and "model." in found["a number"]
        assert "oc.checkpoint.save" in found["torch.save"]


def test_a_gradient_may_be_asked_for_where_fleet_is_in_use():
    hooks.install()  # Tensor.grad is a property of ours then, which has no name
    x = torch.nn.Parameter(torch.ones(2))
    let_go(x, (1,), "x")
    assert x.grad is None
    with torch.no_grad(), pytest.raises(StageError, match="of x"):
        x.sum()
