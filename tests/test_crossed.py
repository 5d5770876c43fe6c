"""Habits of other libraries' users times levels: cells that were wrong without a word, and a small draw."""

from __future__ import annotations

import random
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import crossed_habits
import pytest
import torch
from amounts import PROOF, patience
from fuzz.crossed import HABITS, LEVELS, Outcome, cell, fits, run

from onecard import fleet
from onecard._torch.names import fake_tensors
from onecard.static.capture.undo import Undo
from onecard.static.guards.before import Before
from onecard.static.guards.held import HeldValues
from onecard.static.step.writes import changed_by
from onecard.testing import run_ranks

ENDS: dict[str, dict[str, str]] = {
    "micro": {
        "r1_penalty": "refused .* is not linear in rows that are scaled by their number",
        "noise_by_a_generator": "right",
        "input_gradient_returned": "right",
        "input_penalty": "right",
        "smoothed_with_weights": "right",
        "embedding_by_frequency": "told .* divides gradients by how often a microbatch has an entry",
        "momentum_in_a_dict": "refused .*kept.n., which the step reads, is another tensor",
        "sparse_embedding": "refused .*sparse tensors cannot be recorded",
    },
    "1F1B": {
        "averaged_model_inside": "right",
        "averaged_model": "right",
        "both_states_back": "right",
        "shadow_swapped_in": "right",
        "as_one_vector": "refused .*written into what this rank trains or reads",
        "batches_of_other_sizes": "right",
        "byol_followed_outside": "refused .*written into what this rank trains or reads",
        "momentum_by_get": "told .*the step puts tensors into a dict, list or object of the program",
        "input_gradient_returned": "right",
        "own_optimizer_class": "refused .*keeps its state 'step' as a number of Python",
    },
    "Engine ZeRO 2": {"momentum_in_a_list": "right"},
    "Engine 1F1B": {
        "on_plateau": "right",
        "state_in_a_buffer": "refused .*cannot with one of its 2 microbatches, at .*Input batch size 4",
        "old clipped_by_norm": "told .*the step puts tensors into a dict, list or object of the program",
    },
    "DistModel 1F1B": {"pruned_later": "right", "old one_weight_written": "right"},
    "VPP": {"averaged_model": "right", "old one_weight_written": "right"},
    "dp x pp": {"old weights_clamped": "right"},
    "dp micro": {"schedule_free": "refused .*counts in param_groups.*'k'"},
    "fleet dp": {"gradient_reversal": "right"},
    "recorded dp": {"manual_adam": "right", "lookahead": "right"},
    "recorded ZeRO 3": {"as_one_vector": "right", "lookahead": "right"},
    "plan ZeRO 3": {"optimizer_in_backward": "right", "per_sample_clipped": "right", "grad_transform": "right"},
    "plan dp": {"grad_transform": "right"},
    "plan tp": {"pruned": "right"},
    "ZBV": {
        "loaded_mid_training": "right",
        "batch_with_a_table_of_rows": "refused .*an argument that is a table of as many entries",
    },
    "tp x pp": {"same_step_loaded_between": "right"},
    "auto tp": {"per_sample_clipped": "right"},
    "auto dp": {"elastic_weights": "refused .*by a graph that was made before it became a distributed tensor"},
}
"""How cells end; each was another number than one card's, or an error of torch's own."""


def _cells(level: str, habits: list[str]) -> list[Outcome]:
    fleet.init(is_collective=True)
    crossed_habits.STEPS = 3
    return [cell(habit, level) for habit in habits]


@pytest.mark.share(1)
@pytest.mark.parametrize("level", ENDS)
def test_cells_that_were_wrong(level: str) -> None:
    habits = [*ENDS[level]][: None if PROOF else 1]
    for found in run_ranks(_cells, LEVELS[level][0], level, habits, timeout=patience(120.0)):
        for habit, (kind, words) in zip(habits, found, strict=True):
            wanted = ENDS[level][habit]
            assert re.match(wanted, f"{kind} {words}"), f"{habit} at {level}: {kind} {words}"


@pytest.mark.proof
def test_a_draw_of_all_cells() -> None:
    every = [(h, at) for at, (ranks, _) in LEVELS.items() for h in HABITS if fits(h, at) and (PROOF or ranks <= 2)]
    drawn = random.Random(1).sample([c for c in every if not c[1].startswith("auto")], 200 if PROOF else 3)
    for level in LEVELS:
        for (habit, at), (kind, words) in run([c for c in drawn if c[1] == level]):
            assert not kind.isupper(), f"{kind}: {habit} at {at}: {words}"


def test_a_generator_of_the_program_is_put_back() -> None:
    mine = torch.Generator().manual_seed(3)
    before, undo = mine.get_state(), Undo(Before())
    undo.note(changed_by(torch.ops.aten.randn.generator, ([2],), {"generator": mine}))
    torch.randn(2, generator=mine)
    assert not torch.equal(mine.get_state(), before)
    undo.back()
    assert torch.equal(mine.get_state(), before)


def test_what_a_look_leaves_is_taken_out_again() -> None:
    there, kept = torch.ones(2), {"a": torch.ones(2)}
    holder, late = SimpleNamespace(mean=there, made=[1, there], queue=deque([there], maxlen=1)), there

    def step(fake: Any) -> None:
        nonlocal late
        kept["a"] = kept["b"] = holder.mean = late = fake
        holder.made.append(fake)
        holder.queue.append(fake)
        kept["count"] = 1
        globals()["left_by_a_step"] = fake

    before = kept["a"]
    held = HeldValues([step])
    with fake_tensors():
        step(torch.zeros(2))
    lost = held.back()
    assert kept == {"a": before, "count": 1}
    assert (holder.mean, late, holder.made, [*holder.queue]) == (there, there, [1, there], [there])
    assert "left_by_a_step" not in globals()
    assert {"a", "b", "mean", "left_by_a_step", "late", 0, 2} == {key for key, _ in lost}
