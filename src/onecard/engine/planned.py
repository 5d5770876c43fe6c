"""A step under a plan: ``to_static(step, plan=)``. Its model and optimizers are found, laid out, and the step recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from onecard.auto.apply import Applied
from onecard.auto.entrance import Entrance
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.engine.again import recompute_in
from onecard.engine.full import ALWAYS, IN_ONE, OWN_DTYPES
from onecard.engine.options import static_options
from onecard.engine.strategy import Strategy
from onecard.errors import EngineError, NoBackward, PlanError
from onecard.planning.fold import block_paths
from onecard.planning.machine_file import this_machine
from onecard.planning.plan import Plan
from onecard.planning.search.api import plan as search
from onecard.planning.step_parts import StepParts, parts_of_step
from onecard.static import api
from onecard.static.call import name_of
from onecard.static.recording import Recording
from onecard.static.run.agreed import all_or_none

_trained: Kept[list[weakref.ref[Any]]] = Kept(list)
"""Steps of training that plans have laid out, the last one last."""


class PlannedStep:
    """What ``to_static(step, plan=)`` returns: called like the step, with whole batches on every rank.

    The first call looks at the step without doing it, lays its model and optimizers out in place as the plan says, and begins to
    record it: in stages, in microbatches, with what backward computes again. Dtypes are the step's own.

    Args:
        fn: forward, one ``backward()`` of a loss, the optimizers; plan: how; None: the best one for the first call's batch,
            without microbatches; options: of ``to_static``, beside those that the plan says.

    Attributes:
        plan: once it is known.
    """

    def __init__(self, fn: Callable[..., Any], plan: Plan | None, options: dict[str, Any]) -> None:
        self.fn, self.plan, self._options = fn, plan, options
        self._static: api.Static | None = None
        self._entrance: Entrance | None = None
        self._laid_out: tuple[Strategy, Applied] | None = None

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """Those made so far, the last one used first."""
        return () if self._static is None else self._static.recordings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._static is None:
            self._static = self._begun(args, kwargs)
        given = None if self._entrance is None else self._entrance.handed_in(args, kwargs)
        if given is None:
            return self._static(*args, **kwargs)
        args, kwargs = given.found
        result = self._static(*args, **kwargs)
        given.write_back()
        return result

    def _ranks(self) -> Sequence[int]:
        return range(0 if self.plan is None else min(self.plan.world, world.get_world_size()))

    def _begun(self, args: Any, kwargs: Any) -> api.Static:
        trains = self._trained()
        with all_or_none(name_of(self.fn), "plan", self._ranks):
            try:
                parts = parts_of_step(self.fn, args, kwargs, bool(self._options.get("ask")))
            except (NoBackward, RuntimeError) as fault:
                # What begins inference mode of its own makes tensors that a look without data cannot follow, and no backward.
                if trains is None or not (isinstance(fault, NoBackward) or "inference tensor" in str(fault)):
                    raise
                parts = None
        if parts is None and trains is not None:
            return self._beside(trains)
        held = [parts]
        del parts
        return self._of_training(held)

    def _trained(self) -> PlannedStep | None:
        """The last step of training that was laid out by this plan."""
        known = (step for each in reversed(_trained.here) if (step := each()) is not None)
        return next((step for step in known if self.plan in (None, step.plan)), None)

    def _beside(self, trains: PlannedStep) -> api.Static:
        """A function without gradients runs where the step of training has put the model."""
        assert trains._laid_out is not None and trains.plan is not None
        self.plan, self._entrance = trains.plan, trains._entrance
        strategy, applied = trains._laid_out
        return api.to_static(
            self.fn, **{**static_options(strategy, "eval", self.plan.world, applied.mesh), **self._options}
        )

    def _of_training(self, held: list[Any]) -> api.Static:
        with all_or_none(name_of(self.fn), "plan", self._ranks):
            parts = held.pop()
            model, optimizers = parts.model, parts.optimizers
            if self.plan is None:
                self.plan = _found(parts)
            starts_of(self.plan, model)
        del parts
        gc.collect()  # graphs of what was looked at hold the parameters, in cycles; then they could not be swapped
        plan, at = replace(self.plan, stages=(), recompute_blocks=0, **OWN_DTYPES), starts_of(self.plan, model)
        strategy = Strategy.of_plan(plan)
        applied = Applied(replace(plan, recompute="none"), beside=("pp", "virtual", "microbatches"))
        strategy.pipeline.at = tuple(at)
        if strategy.recompute.checkpoints:
            blocks = block_paths(model)
            recompute_in(model, blocks[: self.plan.recompute_blocks or None] or strategy.recompute.checkpoints)
        if list(applied.mesh.dim_names) != ["pp"]:  # a pipeline alone has no tensor that is divided
            applied.model(model)
            for optimizer in optimizers:
                applied.optimizer(optimizer, model)
            self._entrance = Entrance(applied.mesh, applied.batch_axes)
        self._laid_out = strategy, applied
        _trained.here[:] = [*(step for step in _trained.here if step() is not None), weakref.ref(self)]
        options = static_options(strategy, "train", plan.world, applied.mesh)
        return api.to_static(self.fn, **{**options, **self._options})


def starts_of(plan: Plan, model: nn.Module) -> list[str]:
    """The blocks with which the stages of a plan begin, but for the first; none if it leaves that open.

    Raises:
        PlanError: the plan counts other blocks than the model has.

    Example:
        >>> blocks = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(5))})
        >>> starts_of(Plan(pp=2, stages=(3, 2), microbatches=2), blocks)
        ['blocks.3']
    """
    if not plan.stages:
        return []
    paths = block_paths(model)
    if sum(plan.stages) != len(paths):
        raise PlanError(
            f"to_static: stages={plan.stages} are of {sum(plan.stages)} blocks, and {type(model).__name__} has {len(paths)}: the "
            "plan was made for another program",
            "stages",
        )
    return [paths[i] for i in accumulate(plan.stages[:-1])]


def _found(parts: StepParts) -> Plan:
    """The best plan of a step in one microbatch."""
    fixed, on = {**ALWAYS, **IN_ONE}, this_machine().recorded()
    ranks = world.get_world_size()
    return search(parts.model, world=ranks, machine=on, batch=parts.batch, loss=parts.loss, fixed=fixed).best


def planned(fn: Callable[..., Any], plan: Plan | str | Path, options: dict[str, Any]) -> PlannedStep:
    """A step under a plan.

    Raises:
        EngineError: an option of ``to_static`` that the plan says; or no step.
    """
    if isinstance(fn, nn.Module):
        raise EngineError(
            "to_static(layer, plan=): a plan is of a step, a function of its batch; of a layer: Engine(layer, loss, optimizer, "
            "strategy=Strategy.of_plan(plan))"
        )
    fn = fn.fn if isinstance(fn, api.Static) else fn
    said = [name for name in ("k_steps", "stages") if name in options]
    if said:
        raise EngineError(
            f"to_static(plan=): {said[0]} is the plan's to say: Plan(microbatches=4), Plan(pp=2); leave it out"
        )
    if isinstance(plan, str) and plan == "auto":
        return PlannedStep(fn, None, options)
    return PlannedStep(fn, plan if isinstance(plan, Plan) else Plan.load(plan), options)
