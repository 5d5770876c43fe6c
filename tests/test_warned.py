"""Warnings name the program's line, from wherever in the library they come."""

import ast
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import onecard as oc
from onecard.comm.base.warned import warn

PACKAGE = Path(oc.__file__).parent


def here() -> int:
    """The line that calls."""
    return sys._getframe(1).f_lineno


def told(call) -> list[tuple[str, int]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [(Path(w.filename).name, w.lineno) for w in seen]


def test_a_step_that_is_recorded_anew():
    weight = torch.ones(4, requires_grad=True)

    @oc.to_static
    def step(x):
        weight.grad = None
        (x * weight).sum().backward()

    for _ in range(3):
        step(torch.ones(2, 4))

    def again():
        lines.append(here() + 1)
        step(torch.ones(3, 4))

    lines: list[int] = []
    assert told(again) == [(Path(__file__).name, lines[0])]


def test_microbatches_and_an_operator_without_a_rule():
    model, mesh = nn.Linear(4, 2), oc.ProcessMesh([0], ["dp"])

    @oc.to_static(k_steps=2)
    def step(x):
        model.zero_grad()
        model(x).mean().backward()
        return model(x).detach().max() + x.mean()

    def second():
        step(torch.ones(4, 4))
        lines.append(here() + 1)
        step(torch.ones(4, 4))

    lines: list[int] = []
    assert set(told(second)) == {(Path(__file__).name, lines[0])}
    x = oc.shard_tensor(torch.rand(4), mesh, [Shard(0)])
    line = here() + 1
    assert set(told(lambda: torch.bincount(oc.shard_tensor(torch.tensor([1, 2]), mesh, [Shard(0)]), x[:2]))) <= {
        (Path(__file__).name, line)
    }


def test_once_a_line():
    """As other libraries' warnings: a line that is told in each step is told once."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("so", RuntimeWarning)
    assert [(w.category, str(w.message)) for w in seen] == [(RuntimeWarning, "so")]
    with pytest.raises(RuntimeWarning, match="so"):
        warnings.simplefilter("error")
        warn("so", RuntimeWarning)


def test_nobody_counts_frames():
    """``stacklevel`` is right until somebody puts a function between."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"
    ]
    assert not found
