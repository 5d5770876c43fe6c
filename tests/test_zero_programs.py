"""Random training programs under every stage of ZeRO, against one card; faults that are planted are found by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from amounts import seeds
from fuzz.zero import Program, Step, difference, draw, search, work
from fuzz.zero_recorded import RecordedRun

from onecard import fleet
from onecard.fleet.zero import sharded_model
from onecard.tensor import buckets
from onecard.testing import run_ranks
from onecard.train.zero.gathered import GatheredParameter
from onecard.train.zero.reducer import Reducer


@pytest.mark.proof
def test_random_programs_are_one_card() -> None:
    wrong = search(seeds(0, 4, 80))
    assert not wrong, "\n\n".join(f"seed {seed}: {why}\n{draw(seed)}" for seed, why in wrong.items())


@pytest.mark.proof
def test_recorded_programs_are_one_card() -> None:
    wrong = search(seeds(0, 3, 60), of=RecordedRun)
    assert not wrong, "\n\n".join(f"seed {seed}: {why}\n{draw(seed)}" for seed, why in wrong.items())


def accumulated_is_lost() -> None:
    """What earlier microbatches gave is dropped."""
    was = Reducer._end

    def end(self: Reducer, started: object) -> None:
        self._kept.clear()
        was(self, started)  # type: ignore[arg-type]

    Reducer._end = end  # type: ignore[method-assign]


def frozen_for_good() -> None:
    """A parameter that is frozen when the model is made parallel gets no hook."""
    was = sharded_model.hook

    def hook(param: object, before: object, after: object) -> None:
        if param.requires_grad:  # type: ignore[attr-defined]
            was(param, before, after)  # type: ignore[arg-type]

    sharded_model.hook = hook  # type: ignore[assignment]


def writes_are_lost() -> None:
    """What the program writes to a parameter that is whole does not reach the part."""
    was = GatheredParameter.forget
    GatheredParameter.forget = lambda self, shown, written: was(self, shown, False)  # type: ignore[method-assign]


def one(step: Step, how: dict[str, Any]) -> Program:
    """Three times this step."""
    model = {"kinds": ("tanh", "norm"), "depth": 2, "optimizers": ("momentum",), "tied": True, "groups": False}
    return replace(draw(3), how={"ranks": 2, "mesh": "dp", **how}, steps=(step,) * 3, **model)


PLAIN = Step(2, "sum", (), (), (True, True), "none", ())
BLOCKS = {"kind": "marks", "stage": "3", "blocks": True}
HABITS: list[Program] = [
    one(replace(PLAIN, after=("look and scale",)), {**how, "policy": policy, "overlap": overlap})
    for how in (BLOCKS, {"kind": "level", "stage": "p_g_os"})
    for policy, overlap in ((False, False), (False, True), (True, True))
]
HABITS += [
    one(replace(PLAIN, after=("new optimizer",)), {**how, "policy": False, "overlap": overlap})
    for how in ({"kind": "marks", "stage": "2"}, {"kind": "marks", "stage": "0"}, BLOCKS)
    for overlap in (False, True)
    for how in ({"blocks": False, **how},)
]


def habits(plant: Callable[[], None] | None = None) -> list[str]:
    fleet.init(is_collective=True)
    buckets.BUCKET_BYTES = 512
    if plant is not None:
        plant()
    return [difference(program) for program in HABITS]


@pytest.mark.proof
def test_weights_written_between_forwards_and_optimizers_made_anew() -> None:
    assert run_ranks(habits, 2) == [[""] * len(HABITS)] * 2
    assert any(run_ranks(habits, 2, writes_are_lost)[0])


PLANTS: dict[Callable[[], None], tuple[str, ...]] = {
    accumulated_is_lost: ("2", "os_g"),
    frozen_for_good: ("os", "os_g", "p_g_os"),
}


@pytest.mark.proof
@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.__name__)
def test_planted_faults_are_found(plant: Callable[[], None]) -> None:
    chosen = [s for s in range(100) if (how := draw(s).how)["ranks"] == 2 and how["stage"] in PLANTS[plant]][:6]
    assert any(run_ranks(work, 2, chosen, plant)), "not found"
