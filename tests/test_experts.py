"""Expert parallelism by marks: programs for one card whose experts are cut along an axis, beside the same on one card."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from experts_programs import LAYERS, grouped
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks

EXPERTS, TOP, WIDTH, INNER, TOKENS = 8, 2, 16, 12, 24
R, S = oc.Replicate(), oc.Shard
Mesh = tuple[tuple[int, ...], list[str]]

# The mesh; how tokens lie; how the stacks (experts, 2 inner, width) and (experts, width, inner) lie.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], list[Any], list[Any], list[Any]]] = {
    "ep=2": ((2,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "ep=2, tokens whole": ((2,), ["ep"], [R], [S(0)], [S(0)]),
    "dp=2": ((2,), ["dp"], [S(0)], [R], [R]),
    "ep=4": ((4,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "ep in dp": ((2, 2), ["dp", "ep"], [S(0), S(0)], [R, S(0)], [R, S(0)]),
    "ep beside dp": ((2, 2), ["dp", "ep"], [S(0), R], [R, S(0)], [R, S(0)]),
    "ep beside tp": ((2, 2), ["ep", "tp"], [S(0), R], [S(0), S(1)], [S(0), S(2)]),
}
TWO = [name for name, layout in LAYOUTS.items() if math.prod(layout[0]) == 2]
FOUR = [name for name in LAYOUTS if name not in TWO]


def values(seed: int, tokens: int = TOKENS, experts: int = EXPERTS) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = (tokens, WIDTH), (experts, WIDTH), (experts, 2 * INNER, WIDTH), (experts, WIDTH, INNER)
    return [torch.randn(shape, generator=source) * 0.4 for shape in shapes]


def marked(name: str, given: list[Tensor]) -> list[Any]:
    shape, axes, tokens, up, down = LAYOUTS[name]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)
    router = [R] * len(shape)
    layouts = (tokens, router, up, down)
    return [oc.shard_tensor(x, mesh, p).requires_grad_() for x, p in zip(given, layouts, strict=True)]


def errors(layer: Any, name: str, given: list[Tensor], top: int = TOP) -> list[float]:
    """The largest relative errors of the result and of each gradient."""
    plain = [x.clone().requires_grad_() for x in given]
    wanted = layer(*plain, top)
    wanted.square().sum().backward()
    mine = marked(name, given)
    made = layer(*mine, top)
    made.square().sum().backward()
    pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True))]
    return [
        float((oc.unshard(a.detach()) - b.detach()).abs().max() / (b.detach().abs().max() + 1e-6)) for a, b in pairs
    ]


def all_layers(names: list[str]) -> dict[str, list[float]]:
    # How often each number comes, and where, no rule can divide: integers, one for each token and expert.
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    return {f"{layer}, {name}": errors(LAYERS[layer], name, values(1)) for layer in LAYERS for name in names}


@pytest.mark.parametrize("names", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_programs_of_all_styles_are_those_of_one_card(names):
    for found in run_ranks(all_layers, math.prod(LAYOUTS[names[0]][0]), names):
        assert {case: e for case, e in found.items() if not max(e) <= 1e-5} == {}


# ---- Bytes


def sent(tokens: int) -> tuple[list[int], list[int]]:
    """Bytes of rows sent forward and backward by this rank with a router that loads all ranks alike; and all other bytes."""
    given = values(2, tokens)
    x, router = given[0], given[1]
    x[:, :EXPERTS] = torch.eye(EXPERTS).repeat(tokens // EXPERTS, 1) * 9
    x[:, :EXPERTS] += torch.eye(EXPERTS).roll(EXPERTS // 2, 0).repeat(tokens // EXPERTS, 1) * 8
    router.zero_()[:, :EXPERTS] = torch.eye(EXPERTS)
    mine = marked("ep=2", given)
    with oc.explain() as report:
        made = grouped(*mine, TOP)
        report.next_step()
        made.square().sum().backward()
    rows = [sum(m.step.bytes for m in step if m.shape[-1:] == (WIDTH,)) for step in report.steps]
    return rows, [sum(m.step.bytes for m in step) - n for step, n in zip(report.steps, rows, strict=True)]


def test_rows_are_sent_once_to_their_experts_and_once_back():
    ranks, tokens = 2, 64
    bound = 2 * (tokens // ranks) * TOP * WIDTH * 4 * (ranks - 1) // ranks
    numbers = TOP * (tokens // ranks) * (8 + 4)  # which expert, and its weight; sent to one other rank at most
    for rows, rest in run_ranks(sent, ranks, tokens):
        assert rows == [bound, bound]
        assert max(rest) <= numbers


# ---- Uneven and empty


def one_sided(name: str, experts: int, tokens: int, favourites: list[int]) -> list[float]:
    """All tokens go to a few experts."""
    given = values(3, tokens, experts)
    given[0][:, 0] = 5.0
    given[1][:, 0] = torch.tensor([4.0 * (e in favourites) for e in range(experts)])
    return errors(LAYERS["grouped"], name, given)


UNEVEN = [
    (8, 24, [0, 1]), (8, 24, [7, 6]), (5, 24, [4, 0]), (3, 24, [1, 2]), (2, 24, [0, 1]), (8, 5, [0, 7]), (8, 1, [3, 4]),
]  # fmt: skip


def all_uneven(names: list[str]) -> dict[str, list[float]]:
    return {f"{name}, {case}": one_sided(name, *case) for name in names for case in UNEVEN}


@pytest.mark.parametrize("names", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_few_tokens_few_experts_and_all_tokens_to_one(names):
    for found in run_ranks(all_uneven, math.prod(LAYOUTS[names[0]][0]), names):
        assert {case: e for case, e in found.items() if not max(e) <= 1e-5} == {}
