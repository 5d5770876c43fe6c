"""The parts of a job's price, each by itself: which a sum of all of them would not tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import onecard as oc
from onecard.pipeline.schedule.action import Action
from onecard.pipeline.schedule.timing import Span
from onecard.planning.fold import block_paths, face, fold
from onecard.planning.memory import RankMemory
from onecard.planning.stages import StageCost
from onecard.planning.state import TrainingState

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from jobs import JOBS, priced, program

A100 = oc.Machine.preset("A100")
SIZES = oc.Transformer(layers=7, hidden=256, heads=8, vocab=1024, sequence=128)


def test_terms_are_what_the_pieces_say():
    found = oc.price(SIZES, oc.Plan(tp=2, microbatches=3), A100)
    waits = sum(piece.alike * piece.messages["tp"] for piece in found.pieces)
    whole = sum(piece.alike * (piece.forward + piece.backward) for piece in found.pieces)
    assert found.terms["messages along 'tp'"] == pytest.approx(3 * waits, rel=1e-9)
    added = 3 * A100.copy(found.pieces[0].parameters * (2 + 2 * 4))  # of one piece, gradients to those before
    assert found.terms["compute"] > 3 * (whole - waits) + added
    assert found.terms["bubble"] == 0.0


def test_sums_that_wait_for_the_optimizer_take_their_time():
    """Where links are slow, the step is its messages: those of the recording of the real one."""
    (job,) = [job for job in JOBS if job.name == "tp=2"]
    slow = oc.Machine(bandwidth=1e7)
    with oc.pretend(2, fake=True):
        step, batch, _ = program(job, small=False)
        step(*batch)
        real = oc.record(step)(*batch).cost(slow)
    assert priced(job, slow, small=False).seconds == pytest.approx(real.seconds, rel=0.01)


def test_gradients_are_summed_over_dp_and_cp_and_replicas():
    def sent(**given: int) -> tuple[int, int]:
        rank = oc.price(SIZES, oc.Plan(**given), A100)
        return rank.ranks[0].sent["dp"], sum(piece.alike * piece.parameters for piece in rank.pieces)

    count, elements = sent(cp=2)
    assert count == 4 * elements  # an all-reduce over two sends its own size
    count, elements = sent(dp=4, zero=1, replicas=2)
    own = elements // 2  # scattered over two: half is sent; summed with the other copy; gathered in bfloat16
    assert count == pytest.approx(4 * own + 4 * own + 2 * own, rel=1e-4)


def test_blocks_that_do_not_come_out_even_go_to_the_first_stages():
    found = oc.price(SIZES, oc.Plan(pp=3, microbatches=3), A100)
    blocks = [sum(n for name, n in rank.pieces if name.startswith("blocks")) for rank in found.ranks]
    assert blocks == [3, 2, 2]


class Windowed(nn.Linear):
    """A block with two numbers: its own, and one that means something."""

    def __init__(self, number: int, window: int) -> None:
        super().__init__(4, 4)
        self.number, self.window = number, window


@pytest.mark.parametrize(
    ("windows", "alike"),
    [([8] * 6, (1, 4, 1)), ([8, 4] * 3 + [4], (1, 1, 1, 1, 1, 1, 1)), ([8] * 5 + [4], (1, 3, 1, 1))],
)
def test_blocks_are_alike_but_for_their_number(windows, alike):
    model = nn.ModuleDict({"blocks": nn.ModuleList(Windowed(i, w) for i, w in enumerate(windows))})
    (found,) = fold(model)
    assert found.alike == alike and len(model["blocks"]) == len(alike)


@pytest.mark.parametrize("marked", [False, True])
def test_backward_has_two_halves(marked):
    """A product's gradients are two of its size: a zero-bubble schedule has something to fill bubbles with."""

    def price(schedule: str) -> oc.JobCost:
        plan = oc.Plan(pp=2, microbatches=4, schedule=schedule, gradients="float32", **PLAIN)
        if not marked:
            return oc.price(SIZES, plan, A100)
        x = torch.zeros(64, 256)
        return oc.price(Products, plan, A100, batch=(x, x), loss=lambda model, x, y: F.mse_loss(model(x), y))

    found = price("1F1B")
    for piece in found.pieces:
        if piece.name.startswith("blocks"):
            assert 0.25 < piece.backward_weight / piece.backward < 0.65, piece
    assert price("ZBH1").seconds < 0.97 * found.seconds


def test_the_first_stage_does_its_backward_in_one():
    """Nothing crosses back from it: its I makes all gradients and frees what it kept, its W has nothing to do."""
    plan = oc.Plan(pp=3, microbatch=8, microbatches=6, schedule="ZBH1", stages=(3, 2, 2), **PLAIN)
    found = oc.price(SIZES, plan, A100)
    took = {(e.name[0], e.told["stage"]): e.end - e.start for e in found.events if e.name[0] in "IW"}
    assert took["W", 0] < 1e-12 < took["W", 1] and took["I", 0] > 2 * took["I", 1]
    row = [Action.parse(text) for text in ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]]
    pieces = StageCost(tuple((piece, 1) for piece in found.pieces), 0)
    state = TrainingState(oc.Plan(**PLAIN), A100)

    def kept(stage: int) -> int:
        spans = [Span(0, action._replace(stage=stage), float(i), i + 1.0) for i, action in enumerate(row)]
        return RankMemory({stage: pieces}, spans, state, 1).at_peak["activations"]

    assert kept(1) > 1.9 * kept(0)


PLAIN = {"parameters": "float32", "compute": "float32", "master": False}


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_are_parametrized_are_blocks():
    """torch makes a class for each module that is."""

    def model() -> nn.Module:
        blocks = (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()) for _ in range(3))
        return nn.Sequential(nn.ModuleList(blocks))

    assert block_paths(model()) == ["0.0", "0.1", "0.2"]
    other: nn.Module = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), *model()[0][1:]]))  # type: ignore[index]
    assert face(other[0][0]) != face(other[0][1])  # type: ignore[index]
