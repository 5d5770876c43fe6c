"""Experts by marks that are right and dear are told once, with operator, line and bytes; what sends rows alone is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_programs import LAYERS, routed
from torch import Tensor

import onecard as oc
from onecard.tensor.dispatch import costly
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard


def iterated(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """Weights taken apart by a loop over the stack itself."""
    _, numbers = routed(x, router, top)
    total = torch.zeros_like(x)
    for e, (w, v) in enumerate(zip(up, down, strict=True)):
        gate, value = F.linear(x, w).chunk(2, -1)
        total = total + F.linear(F.silu(gate) * value, v) * (numbers == e).any(-1, keepdim=True)
    return total


def listed(x: Tensor, router: Tensor, *experts: Any) -> Tensor:
    """A list of experts, each cut along the axis that tokens are cut along."""
    _, numbers = routed(x, router, 1)
    total = torch.zeros_like(x)
    for e, w in enumerate(experts):
        token = torch.where(numbers == e)[0]
        total = total.index_add(0, token, F.linear(x[token], w))
    return total


def dense(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """No mixture: attention by bmm and an MLP; a head on chosen rows."""
    heads = x.view(4, -1, 16)
    x = torch.bmm(torch.bmm(heads, heads.mT).softmax(-1), heads).reshape(x.shape)
    x = x + F.linear(F.relu(F.linear(x, up)), down)
    return F.linear(x[x.detach()[:, 0] > 0], up)


def told(
    run: Callable[..., Tensor], given: list[Tensor], more: list[Any], lie: list[Any], mesh: oc.ProcessMesh
) -> list[str]:
    """The first words of what is told in two steps."""
    costly._told.here.clear()
    parts = [torch.nn.Parameter(oc.shard_tensor(x, mesh, p)) for x, p in zip(given, lie, strict=True)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            run(*parts, *more).square().sum().backward()
    mine = [w for w in seen if issubclass(w.category, oc.CostlyExpertsWarning)]
    assert all(w.filename.endswith((".py",)) and w.lineno > 1 and "grouped_mm" in str(w.message) for w in mine)
    return [str(w.message).split(" from this rank to ")[0].split(" sends ")[0] for w in mine]


def cases(least: int) -> dict[str, list[str]]:
    costly.LEAST = least
    draw = torch.Generator().manual_seed(1)
    shapes = (32, 16), (8, 16), (8, 32, 16), (8, 16, 16)
    values = [torch.randn(*shape, generator=draw) / 4 for shape in shapes]
    line, grid = oc.ProcessMesh([0, 1, 2, 3], ["ep"]), oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"])
    found: dict[str, list[str]] = {}
    for mesh, marks in ((line, [[S(0)], [R], [S(0)], [S(0)]]), (grid, [[S(0), S(0)], [R, R], [R, S(0)], [R, S(0)]])):
        for name, layer in (LAYERS | {"iterated": iterated}).items():
            if name in ("grouped", "loop", "buffered", "einsum", "iterated"):
                found[f"{name} {mesh.ndim}"] = told(layer, values, [2], marks, mesh)
    beside = [[S(0), S(0)], [R, R], [S(1), S(0)], [S(1), S(0)]]
    found["loop beside features"] = told(LAYERS["loop"], values, [2], beside, grid)
    apart = [x.contiguous() for x in values[3]]
    found["listed"] = told(listed, [*values[:2], *apart], [], [[S(0)], [R], *[[S(0)]] * 8], line)
    found["dense"] = told(
        dense, [values[0], values[2][0], values[3][0][:, :1].expand(16, 32).contiguous()], [], [[S(0)]] * 3, line
    )
    return found


@pytest.mark.proof
def test_what_is_dear_is_told_once_and_what_is_cheap_is_not() -> None:
    said = run_ranks(cases, 4, 1)[0]
    cheap = {
        name: words for name, words in said.items() if name in ("grouped 1", "grouped 2", "loop 1", "loop 2", "dense")
    }
    assert not any(cheap.values()), cheap
    kinds = {name: {*words} for name, words in said.items() if name not in cheap}
    assert kinds == {
        "loop beside features": {"linear"},
        "buffered 1": {"bmm"}, "buffered 2": {"bmm"}, "einsum 1": {"einsum"}, "einsum 2": {"einsum"},
        "iterated 1": {"unbind"}, "iterated 2": {"unbind"}, "listed": {"linear"},
    }  # fmt: skip
    assert said["loop beside features"] == ["linear"], "one line, in two steps: once"


def test_small_models_are_told_nothing() -> None:
    assert not any(run_ranks(cases, 4, 1 << 20)[0].values())
