"""Calls on rows in two halves: what of a recorded mixture travels while something else is computed, with one card's numbers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_programs import grouped, routed
from test_experts import LAYOUTS, TOP, WIDTH, marked, values
from torch import Tensor, nn

import onecard as oc
from onecard.static.passes import overlap
from onecard.static.step.row_calls import first_half
from onecard.testing import run_ranks

S = oc.Shard(0)
LAYOUTS["two axes"] = ((2, 2), ["a", "b"], [S, S], [S, S], [S, S])
BATCHES = ("any", "any", "any", "any", "home", "any", "away", "one", "any")  # the first two record and compare


def added_up(x: Tensor, router: Tensor, up: Tensor, down: Tensor, top: int) -> Tensor:
    """``index_add`` brings rows home."""
    weights, numbers = routed(x, router, top)
    flat = numbers.flatten()
    order = torch.argsort(flat, stable=True)
    ends = F.one_hot(flat, len(up)).sum(0).cumsum(0).to(torch.int32)
    token = order // top
    gate, value = F.grouped_mm(x.index_select(0, token), up.mT, offs=ends).chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends)
    return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order, None])


LAYERS = {"grouped": grouped, "added": added_up}


def shared(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


def behind(run: Any, x: Tensor, given: list[Tensor]) -> Tensor:
    """As DeepSeek's and Qwen's: the shared expert comes after the others."""
    *experts, up, down = given
    return run(x, *experts, TOP) + shared(x, up, down)


def ahead(run: Any, x: Tensor, given: list[Tensor]) -> Tensor:
    """As Llama 4's."""
    *experts, up, down = given
    made = shared(x, up, down)
    return made.add_(run(x, *experts, TOP))


def dropped(run: Any, x: Tensor, given: list[Tensor]) -> Tensor:
    """Random numbers are drawn in their order."""
    *experts, up, down = given
    return F.dropout(run(x, *experts, TOP), 0.25) + F.dropout(shared(x, up, down), 0.25)


def written(run: Any, x: Tensor, given: list[Tensor]) -> Tensor:
    """Both go into one place, by turns."""
    *experts, up, down = given
    total = torch.zeros_like(x)
    total += run(x, *experts, TOP)
    total.mul_(0.5)
    total += shared(x, up, down)
    return total


PROGRAMS = {each.__name__: each for each in (behind, ahead, dropped, written)}


def batch(kind: str, seed: int, router: Tensor, ranks: int) -> Tensor:
    """Tokens that go anywhere; to their own rank's experts; to the next rank's, or its neighbour's; all to one expert's."""
    x = values(seed)[0]
    each, part = len(router) // ranks, len(x) // ranks
    if kind == "any":
        return x
    rank = torch.arange(len(x)) // part + (kind == "away")
    rank = rank ^ 1 if kind == "beside" else rank
    expert = torch.zeros(len(x), dtype=torch.long) if kind == "one" else rank % ranks * each
    others = [expert, *([expert + 1] if kind != "one" else [])]
    pull = torch.linalg.pinv(router).T  # row e: what makes expert e's score 1, and the others' 0
    return x * 0.01 + sum(pull[e] * (8.0 - i) for i, e in enumerate(others))


def replays(
    program: str, layer: str, name: str, least: int, batches: tuple[str, ...] = BATCHES
) -> tuple[list[float], list[tuple[str, list[str]]], float]:
    """The largest relative errors of each call; of each first half what runs between it and its call; the price, in seconds."""
    warnings.simplefilter("error", UserWarning)  # nothing is dropped, nothing compared and found different
    overlap.LARGE = least
    run, ranks = LAYERS[layer], math.prod(LAYOUTS[name][0])
    base = values(1)
    draw = torch.Generator().manual_seed(5)
    ours = [torch.randn(WIDTH, 32, generator=draw) * 0.3, torch.randn(32, WIDTH, generator=draw) * 0.3]
    x, *given = marked(name, base)
    whole = [oc.Replicate()] * x.mesh.ndim
    params = [nn.Parameter(v.detach()) for v in [*given, *(oc.shard_tensor(w, x.mesh, whole) for w in ours)]]
    plain = [nn.Parameter(v.clone()) for v in [*base[1:], *ours]]

    def step(x: Tensor, weights: list[Any]) -> Tensor:
        loss = PROGRAMS[program](run, x, weights).square().sum()
        loss.backward()
        return loss

    recorded, found = oc.to_static(lambda x: step(x, params)), []
    for call, kind in enumerate(batches):
        tokens = batch(kind, 10 + call, base[1], ranks)
        torch.manual_seed(call)
        made = recorded(oc.shard_tensor(tokens, x.mesh, LAYOUTS[name][2]))
        torch.manual_seed(call)
        with oc.one_card_random():
            wanted = step(tokens, plain)
        pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(params, plain, strict=True))]
        found.append(max(off(oc.unshard(a.detach()), b.detach()) for a, b in pairs))
        for weight in (*params, *plain):
            weight.grad = None
    return found, [*between(recorded.recordings[-1])], recorded.recordings[-1].cost().seconds


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / (wanted.abs().max() + 1e-3))


def between(recording: Any) -> Any:
    nodes = [*recording.nodes()]
    for node in nodes:
        if (first := first_half(node)) is not None:
            apart = nodes[nodes.index(first) + 1 : nodes.index(node)]
            yield node.args[0].function.__name__, [n.name.rstrip("_0123456789") for n in apart]


HIDDEN = {
    ("behind", "grouped"): [("_settled", "gelu_default"), ("_added", "gelu_backward_default")],
    ("behind", "added"): [("_added", "gelu_default")],
    ("ahead", "grouped"): [("_added", "gelu_backward_default")],
}
"""What a message of a call travels beside: the shared expert, forward and backward."""


@pytest.mark.share(2)
@pytest.mark.parametrize(("program", "layer"), HIDDEN)
def test_messages_travel_beside_the_shared_expert(program: str, layer: str) -> None:
    for found, apart, _ in run_ranks(replays, 2, program, layer, "ep=2", 1):
        assert len(found) == len(BATCHES) and max(found) <= 1e-5, found
        for function, beside in HIDDEN[program, layer]:
            assert any(beside in names for called, names in apart if called == function), (function, beside, apart)


@pytest.mark.proof
@pytest.mark.parametrize(("program", "layer", "name"), [
    ("dropped", "grouped", "ep=2"), ("written", "added", "ep=2"), ("ahead", "added", "ep in dp"),
    ("behind", "grouped", "ep beside tp"),
])  # fmt: skip
def test_numbers_are_one_cards(program: str, layer: str, name: str) -> None:
    for found, apart, _ in run_ranks(replays, math.prod(LAYOUTS[name][0]), program, layer, name, 1):
        assert len(found) == len(BATCHES) and max(found) <= 1e-5, found
        assert apart


@pytest.mark.proof
def test_rows_that_go_along_two_axes_later() -> None:
    """As the step was recorded they went along one: a first half that sends twice sends both."""
    batches = ("beside", "beside", "any", "any", "home", "any", "beside", "away", "any")
    for found, apart, _ in run_ranks(replays, 4, "behind", "grouped", "two axes", 1, batches):
        assert apart and len(found) == len(batches) and max(found) <= 1e-5, found


@pytest.mark.proof
def test_small_messages_are_sent_at_once_and_cost_more() -> None:
    beside, alone = (run_ranks(replays, 2, "behind", "grouped", "ep=2", least) for least in (1, 1 << 20))
    for (_, _, less), (found, apart, seconds) in zip(beside, alone, strict=True):
        assert max(found) <= 1e-5 and apart == [] and less < seconds


@pytest.mark.proof
def test_all_ranks_send_alike() -> None:
    """Also where the step was recorded with a batch of which one rank sends all and another nothing."""
    (found, apart, _), (_, other, _) = run_ranks(
        replays, 2, "behind", "grouped", "ep=2", 128, ("any", "one", "one", "any", "home")
    )
    assert max(found) <= 1e-5 and apart and [function for function, _ in apart] == [function for function, _ in other]
