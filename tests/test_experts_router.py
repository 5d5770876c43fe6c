"""Losses of a router by marks: those of one card over the whole batch, whatever lies where. Memory of experts falls with ep."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from router_programs import FAULTS, LAYOUTS, TOLD, Routed, differences, held, train
from torch import Tensor

from onecard.testing import RankError, run_ranks

KINDS = [Routed(), Routed(score="sigmoid")]


@cache
def one_card(what: Routed) -> dict[str, Tensor]:
    return run_ranks(train, 1, what)[0]


def compared(pairs: list[tuple[Routed, dict[str, Tensor]]]) -> list[dict[str, float]]:
    return [differences(what, wanted) for what, wanted in pairs]


def cells(ranks: int) -> list[Routed]:
    found = [
        replace(kind, layout=name) for kind in KINDS for name, lay in LAYOUTS.items() if math.prod(lay[0]) == ranks
    ]
    if ranks == 4:
        found += [replace(kind, layout="dp=2 ep=2", zero=True) for kind in KINDS]
    return found


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_counts_and_gradients_are_one_cards(ranks: int) -> None:
    whats = cells(ranks)
    pairs = [(what, one_card(replace(what, layout="", zero=False))) for what in whats]
    for of_rank in run_ranks(compared, ranks, pairs):
        assert {
            (what.layout, what.score, what.zero): off for what, off in zip(whats, of_rank, strict=True) if off
        } == {}


@pytest.mark.proof
def test_every_planted_fault_is_seen() -> None:
    whats = []
    for fault, layout in FAULTS.items():
        whats.append(Routed(layout, fault=fault))
    pairs = [(what, one_card(replace(what, layout="", fault=""))) for what in whats]
    found = run_ranks(compared, 2, pairs)
    unseen = [what.fault for i, what in enumerate(whats) if not any(of_rank[i] for of_rank in found)]
    assert unseen == []


@pytest.mark.share(1)
@pytest.mark.parametrize("fault", TOLD)
def test_what_ranks_do_not_have_alike_is_told_of(fault: str) -> None:
    with pytest.raises(RankError, match=r"differs between ranks|on rank 0 and .* on rank 1"):
        run_ranks(train, 2, Routed(TOLD[fault], "sigmoid", fault=fault))


@pytest.mark.proof
def test_experts_take_memory_by_ep() -> None:
    whole = run_ranks(held, 1, Routed())[0]
    for layout, zero, parts in (("ep=2", False, (2, 2, 2)), ("ep=4", False, (4, 4, 4)), ("dp=2 ep=2", True, (2, 2, 4))):
        wanted = {kind: nbytes // n for (kind, nbytes), n in zip(whole.items(), parts, strict=True)}
        for of_rank in run_ranks(held, math.prod(LAYOUTS[layout][0]), Routed(layout, zero=zero)):
            assert of_rank == wanted, layout
