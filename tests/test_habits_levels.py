"""The table of habits and levels: every cell is one card's, or refused with words; faults that are planted are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from amounts import amount, cells, share
from habits_further import FURTHER
from habits_levels import HABITS, LEVELS, PIPELINES, PLANS, RECORDED, STAGES, check, in_steps
from torch import nn

from onecard import fleet
from onecard.fleet.layers import tied_layers
from onecard.fleet.zero import local_parameter, sharded_model
from onecard.pipeline.run import waiting_hooks
from onecard.testing import run_ranks
from onecard.train.zero import master, zero
from onecard.train.zero.gathered import GatheredParameter
from onecard.train.zero.zero import ShardedUpdate

MARKS = tuple(level for level in LEVELS if level.startswith("ZeRO") and level not in RECORDED)
BY_HAND = tuple(level for level in LEVELS if level not in (*MARKS, *RECORDED, *STAGES, *PIPELINES, *PLANS))


def column(chosen: list[tuple[str, str]], plant: Callable[[], None] | None = None) -> dict[str, str]:
    """What is wrong, by cell."""
    fleet.init(is_collective=True)
    if plant is not None:
        plant()
    found = {f"{name} at {level}": check(name, level) for name, level in chosen}
    return {cell: fault for cell, fault in found.items() if fault}


@pytest.mark.share(1)
@pytest.mark.parametrize("level", ["dp", "p_g_os", "pp 1F1B"])
def test_what_was_wrong_is_one_card_or_refused(level: str) -> None:
    """Layers that come while a model is in evaluation, modes that change in mid-run, conversions, layers without shapes."""
    names = ("layer_exchanged_in_evaluation", "other_mode_later", "converted_later", "lazy_layer")
    chosen = [*((name, level) for name in names), *[("closure_with_penalty", "os_g")] * (level == "dp")]
    for wrong in run_ranks(column, 2, chosen, timeout=amount(120, 1200)):
        assert not wrong, "\n".join(f"{cell}: {fault}" for cell, fault in wrong.items())


@pytest.mark.proof
def test_further_habits() -> None:
    plain = [level for level in LEVELS if level not in RECORDED]
    chosen = share(cells(FURTHER, plain, every=20), 12)
    chosen.sort(key=lambda c: c[1] in PIPELINES)  # which leave another grid behind them
    for wrong in run_ranks(
        column, 2, [c for c in chosen if not c[0].startswith("compiled")], timeout=amount(300, 3600)
    ):
        assert not wrong, "\n".join(f"{cell}: {fault}" for cell, fault in wrong.items())


def all_right(levels: tuple[str, ...], habits: tuple[str, ...]) -> None:
    """Each level with a part of the habits, each habit at one of all levels, or (`make proof`) all cells."""
    for wrong in run_ranks(column, 2, cells(habits, levels, every=20), timeout=amount(300, 1200)):
        assert not wrong, "\n".join(f"{cell}: {fault}" for cell, fault in wrong.items())


@pytest.mark.proof
@pytest.mark.parametrize(
    "levels",
    [MARKS, BY_HAND, STAGES, PIPELINES, PLANS],
    ids=["marks", "by hand", "stages by marks", "pipelines", "plans"],
)
def test_every_cell_is_one_card(levels: tuple[str, ...]) -> None:
    all_right(levels, tuple(name for name in HABITS if name not in FURTHER))


@pytest.mark.proof
def test_every_cell_that_is_recorded_is_one_card() -> None:
    all_right(RECORDED, tuple(name for name in in_steps() if name not in FURTHER))


def closes_over_a_layer() -> str:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    first, second, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.ones(4, 6)
    layers = [first, nn.GELU(), second, lambda h: h @ first.weight]
    model = fleet.distributed_model(fleet.PipelineLayer(layers, loss_fn=nn.functional.mse_loss))
    try:
        model.forward_backward_pipeline([x, x])
    except fleet.FleetError as error:
        return str(error)
    return ""


def test_a_layer_that_reads_one_of_another_rank_is_refused() -> None:
    first, second = run_ranks(closes_over_a_layer, 2)
    assert not first
    assert "on rank 1 have read parameter 0.weight" in second
    assert "SharedLayerDesc" in second


# ---- Faults that are planted


def masters_are_believed() -> None:
    """What a program writes to a parameter is lost at the next step."""
    master._follow = lambda copy, param: None


def closures_see_parts() -> None:
    """A closure runs while only this rank's parts are updated."""
    ShardedUpdate._evaluate = lambda self, optimizer, closure: (closure(), self.reducer.finish())[0]  # type: ignore[method-assign]


def hooks_see_summands() -> None:
    """A hook is given one rank's gradient."""
    local_parameter.PlainParameter.of_whole = lambda self, call: call  # type: ignore[method-assign]


def inputs_are_twins() -> None:
    """Autograd is asked for gradients of tensors that are not in its graph."""
    sharded_model.plain_of = lambda x: None


def written_is_lost() -> None:
    """What is written to a weight by its name does not reach the part."""
    was = GatheredParameter.forget
    GatheredParameter.forget = lambda self, shown, written: was(self, shown, False)  # type: ignore[method-assign]


def hooks_do_not_wait() -> None:
    """A hook is given the gradient of each microbatch."""
    waiting_hooks._users_hooks = lambda p, among=None: []


def ties_are_forgotten() -> None:
    """One parameter on two ranks becomes two."""
    tied_layers.tie = lambda *args: None


def late_hooks_are_late() -> None:
    """A step's hook that is registered later comes when its gradients have been taken."""
    zero.register_last = lambda optimizer, hook: optimizer.register_step_pre_hook(hook)


PLANTS: dict[Callable[[], None], tuple[tuple[str, ...], tuple[str, ...]]] = {
    masters_are_believed: (("os_g offload", "ZeRO 1 offload"), ("weights_clamped", "loaded_between")),
    closures_see_parts: (("os", "os_g"), ("lbfgs",)),
    hooks_see_summands: (("os",), ("hooks_on_parameters", "hooks_before")),
    inputs_are_twins: (("os", "os_g"), ("gradients_of_some",)),
    written_is_lost: (("p_g_os",), ("one_weight_written",)),
    hooks_do_not_wait: (("stages 1F1B", "pp ZBH1"), ("hooks_on_parameters", "hooks_after_accumulation")),
    ties_are_forgotten: (("pp 1F1B",), ("tied",)),
    late_hooks_are_late: (("os_g offload", "ZeRO 1 offload"), ("hooks_on_steps_by_the_model",)),
}


def planted() -> list[str]:
    """The faults that no cell notices."""
    fleet.init(is_collective=True)
    unseen = []
    for plant, (levels, habits) in PLANTS.items():
        changed = {(holder, name): getattr(holder, name) for holder, name in PLACES}
        plant()
        missed = [f"{plant.__name__}: {h} at {at}" for at in levels for h in habits if not check(h, at)]
        unseen += missed
        for (holder, name), value in changed.items():
            setattr(holder, name, value)
    return unseen


PLACES = [
    (master, "_follow"),
    (ShardedUpdate, "_evaluate"),
    (local_parameter.PlainParameter, "of_whole"),
    (sharded_model, "plain_of"),
    (GatheredParameter, "forget"),
    (waiting_hooks, "_users_hooks"),
    (tied_layers, "tie"),
    (zero, "register_last"),
]


@pytest.mark.proof
def test_planted_faults_are_found() -> None:
    assert run_ranks(planted, 2) == [[], []]
