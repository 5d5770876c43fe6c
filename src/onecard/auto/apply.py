"""parallelize: a plan applied to a plain model, its optimizers and its batches, in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from onecard.auto.entrance import Entrance
from onecard.auto.first_batch import first_batch
from onecard.auto.stages.laid_out import in_stages
from onecard.auto.swap import lay_out
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.errors import NothingFits, PlanError
from onecard.machine.cost import MACHINE, Machine
from onecard.place.mesh import ProcessMesh
from onecard.planning.fold import blocks_of
from onecard.planning.placements import hold_outputs, names_of, strange
from onecard.planning.placements import placed as placed_by
from onecard.planning.plan import Plan
from onecard.planning.search.api import plan as search
from onecard.planning.search.plans import Plans
from onecard.train import ShardingStage1, ShardingStage2, ShardingStage3, shard_optimizer
from onecard.train.modules.second_run import run_again_in_backward

_ALL_FIRST = "F-then-B"
STAGES = {1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}
_STEP = "oc.to_static(step, plan=plan), or Engine with Strategy.of_plan(plan), which cut a recorded step"
_CP = "oc.shard_tensor(ids, mesh, [oc.Shard(0), oc.Shard(1)]) on a mesh ('dp', 'cp')"
_REFUSED = (
    ("virtual", lambda p: p.virtual > 1, f"in a loop of its own each rank has one stage: {_STEP}"),
    ("microbatches", lambda p: p.pp == 1 < p.microbatches, "the batch is computed in one: oc.to_static(step, plan=plan)"),
    ("cp", lambda p: p.cp > 1, f"a sequence is divided by marks ({_CP}), or by fleet (sep_degree, fleet.ring_attention)"),
    ("sequence_parallel", lambda p: p.sequence_parallel, "needs layers that know of it, as fleet's do; of others say outputs="),
    ("ep", lambda p: p.ep > 1, "the model's own code says where experts are"),
    ("offload", lambda p: p.offload, "states in the host's memory are fleet's: fleet.group_sharded_parallel(offload=True)"),
    ("recompute", lambda p: p.recompute in ("selective", "operators"), "'full' or 'none'; a recorded step takes 'operators'"),
)  # fmt: skip
"""What of a plan no plain model can have applied: the field, whether a plan has it, why not."""


PLAIN = {"pp": 1, "cp": 1, "microbatches": 1}
"""Fields of the plans that any plain model can have, as it trains in a loop of its own."""
_IN_STAGES = {"cp": 1, "microbatches": 1, "virtual": 1, "schedule": "1F1B"}
"""And of those that go through stages, one after the other, which is slow: where nothing else has room."""


def found_plain(searched: Callable[[dict[str, Any]], Plans], fixed: Mapping[str, Any] = MappingProxyType({})) -> Plans:
    """The plans of a plain model: without stages, and where none of these fits, in stages.

    Args:
        searched: finds plans with such fields.
        fixed: fields that somebody has said.

    Raises:
        NothingFits: nor in stages.
    """
    try:
        return searched({**PLAIN, **fixed})
    except NothingFits as why:
        try:
            return searched({**_IN_STAGES, **fixed})
        except PlanError:
            raise why from None


def pure(ranks: int) -> Plan:
    """Data parallelism over all ranks: what any program can have."""
    return Plan(dp=ranks, per_host=0, parameters="float32", compute="float32")


class Applied:
    """A plan on the ranks of this world.

    Args:
        plan: of as many ranks as there are; beside: fields that somebody else sees to, who records the step.

    Attributes:
        mesh: its axes are those of the plan that have more than one rank.

    Raises:
        PlanError: the plan is for another number of ranks, or asks for what cannot be applied to a plain model.
    """

    def __init__(self, plan: Plan, beside: Collection[str] = ()) -> None:
        check(plan, plan.world if world.alone.here else world.get_world_size(), beside)
        self.plan, self._in_stages = plan, plan.pp > 1 and "pp" not in beside
        if self._in_stages and plan.microbatches > 1 and plan.schedule != _ALL_FIRST:
            warn(
                f"parallelize: schedule={plan.schedule!r}: in a loop of its own a model goes through its stages as {_ALL_FIRST}: "
                f"all {plan.microbatches} microbatches are kept for backward. A schedule needs a recorded step: {_STEP}",
            )
        copies, parts = plan.replicas, plan.dp // plan.replicas
        degrees = (("pp", plan.pp), ("replicas", copies), ("dp", parts), ("tp", plan.tp))
        sizes = [(name, size) for name, size in degrees if size > 1]
        sizes = sizes or [("dp", 1)]
        self.mesh = ProcessMesh(np.arange(plan.world).reshape([size for _, size in sizes]), [name for name, _ in sizes])
        self.batch_axes = tuple(name for name in self.mesh.dim_names if name not in ("pp", "tp"))

    def model(self, model: nn.Module, placed: bool = True) -> Entrance:
        """Lay a model out, and divide what it is called with; ``placed``: its parameters by the plan's placements."""
        patterns, outputs = (self.plan.placements, self.plan.outputs) if placed else ((), ())
        if placed:
            check_names(model, self.plan)
        again = _blocks(model)[: self.plan.recompute_blocks or None] if self.plan.recompute == "full" else []
        zero = self.plan.zero if self.plan.dp > self.plan.replicas else 0
        staged = placed and self._in_stages
        if staged:
            where = lambda name, mesh: placed_by(patterns, name, mesh.dim_names)  # noqa: E731
            entrance = in_stages(model, self.plan, self.mesh, self.batch_axes, where, again, zero)
        else:
            everywhere = lambda name: placed_by(patterns, name, self.mesh.dim_names)  # noqa: E731
            lay_out(model, self.mesh, everywhere, staged=self.plan.pp > 1 and not self._in_stages, zero=zero)
            entrance = Entrance(self.mesh, self.batch_axes)
        for block in again:  # their forward runs again in backward
            run_again_in_backward(block)
        hold_outputs(outputs, model)
        if self.batch_axes and not staged:
            entrance.before(model)
        return entrance

    def optimizer(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        """States where the plan has them."""
        zero = self.plan.zero if "dp" in self.mesh.dim_names and self.plan.dp // self.plan.replicas > 1 else 0
        overlap = None if self.plan.overlap else False  # where the device runs both beside each other
        if not zero:
            shard_optimizer(optimizer)
        elif self._in_stages:  # each parameter has its stage's mesh
            shard_optimizer(optimizer, STAGES[zero]("dp", overlap=overlap))
        elif zero == 3:
            shard_optimizer(optimizer, ShardingStage3("dp", self.mesh, model=model, overlap=overlap))
        else:
            shard_optimizer(optimizer, STAGES[zero]("dp", self.mesh, overlap=overlap))


def check(plan: Plan, ranks: int, beside: Collection[str] = ()) -> None:
    """Whether a plan can be applied to a plain model on so many ranks.

    Raises:
        PlanError: by the field's name.
    """
    if plan.world != ranks:
        raise PlanError(f"parallelize: the plan is for {plan.world} ranks, and there are {ranks}: make one for these")
    for field, asks, why in _REFUSED:
        if field not in beside and asks(plan):
            raise PlanError(f"parallelize: {field}={getattr(plan, field)!r}: {why}", field)


def check_names(model: nn.Module, plan: Plan) -> None:
    """Whether each pattern of a plan's placements is of some parameter, and each of its outputs of some module.

    Raises:
        PlanError: the plan was made for another program.
    """
    for field, names in names_of(model).items():
        if pattern := strange(getattr(plan, field), names):
            what = "parameter" if field == "placements" else "module"
            raise PlanError(
                f"parallelize: the plan's {field} name {pattern!r}, and {type(model).__name__} has no such {what}: it was "
                f"made for another program; this one has {', '.join(names[:4])}{', ...' * (len(names) > 4)}",
                field,
            )


def _tell_undivided(plan: Plan, model: nn.Module) -> None:
    """Tell that ranks along "tp" would all compute the same."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())} if plan.tp > 1 else {}
    if plan.tp > 1 and not any(placed_by(plan.placements, name, ("tp",))[0].is_shard() for name in named):
        tp, name = plan.tp, next((name for name, x in named.items() if x.ndim > 1), "weight")
        warn(
            f"parallelize: tp={tp}: the plan's placements divide no parameter of {type(model).__name__} along 'tp': its {tp} "
            f'ranks compute the same. Plan(tp={tp}, placements=(("{name}", "tp: Shard(0)"), ...)) divides some; oc.plan(...) '
            "finds placements that gain",
        )


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers."""
    found = blocks_of(model)
    if not found:
        raise PlanError(
            "parallelize: recompute='full' computes blocks again, and the model has no list of blocks that are alike",
            "recompute",
        )
    return found


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: Any = None,
    plan: Plan | str | Path = "auto",
    *,
    loss: Any = None,
    machine: Machine = MACHINE,
    memory: int | None = None,
    config: Any = None,
) -> tuple[Any, Any, Any]:
    """Lay a plain model, its optimizers and its batches out as a plan says. What comes back is what was given, changed in place.

    Args:
        model: plain, the same on all ranks, before its first forward with gradients.
        optimizer: one, several or none; of its parameters.
        loader: gives whole batches on every rank; the model divides what it is called with.
        plan: an ``oc.Plan``, the path of one's file, or "auto": the best one for the loader's first batch (``oc.plan``).
        loss, machine, memory: of that search: (model, *batch) -> the loss, or a criterion of the model's output and the batch's
            last tensor; None if the model returns it.
        config: None; Paddle's is taken by ``oc.paddle.parallelize(model, optimizer, mesh, config)``.

    Returns:
        (model, optimizer, loader).

    Raises:
        PlanError: the plan is for other ranks or another program, or asks for what only a recorded step can have.

    Source: ``paddle.distributed.parallelize`` and ``to_distributed``.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> weight = model.weight
        >>> _ = parallelize(model, plan=Plan())
        >>> weight is model.weight, weight.placements
        (True, (Replicate(),))
    """
    if config is not None or isinstance(loader, ProcessMesh):
        what = "config=" if config is not None else f"loader={loader!r}"
        raise PlanError(
            f"parallelize: {what}: a dict of plans for layers is taken by oc.paddle.parallelize(model, optimizer, mesh, config); "
            "oc.parallelize takes batches and an oc.Plan, or finds one",
            "plan",
        )
    if isinstance(optimizer, Plan) or isinstance(loader, Plan) or not isinstance(plan, Plan | str | Path):
        raise PlanError(
            "parallelize: a plan is given by name, as an oc.Plan: parallelize(model, optimizer, plan=oc.Plan(dp=2))"
        )
    if isinstance(plan, Plan) and plan.zero and not optimizer:
        raise PlanError(
            f"parallelize(model, plan=): zero={plan.zero} divides an optimizer's states, and no optimizer is given: "
            "parallelize(model, optimizer, plan=...), or zero=0",
            "zero",
        )
    if plan == "auto":
        plan = _found(model, loader, loss, machine, memory)
    applied = Applied(plan if isinstance(plan, Plan) else Plan.load(plan))
    _tell_undivided(applied.plan, model)
    applied.model(model)
    for each in [optimizer] if isinstance(optimizer, Optimizer) else optimizer or []:
        applied.optimizer(each, model)
    return model, optimizer, loader


def _read_once(loader: Any) -> PlanError:
    return PlanError(
        f'parallelize(plan="auto"): the step is priced with the shapes of a batch, and {type(loader).__name__} can be read only '
        "once: give a list with one batch in its place, a DataLoader, or a plan",
        "plan",
    )


def _found(model: nn.Module, loader: Any, loss: Any, machine: Machine, memory: int | None) -> Plan:
    """The best plan for a loader's first batch, which is read for its shapes."""
    if loader is None:
        raise PlanError(
            'parallelize(plan="auto"): the step is priced with the shapes of a batch: give a loader too, or plan=oc.Plan(dp=8)',
            "plan",
        )
    batch = first_batch(loader, lambda: _read_once(loader))
    parts = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    ranks = world.get_world_size()
    found = found_plain(
        lambda fixed: search(model, world=ranks, machine=machine, batch=parts, loss=loss, memory=memory, fixed=fixed)
    ).best
    gc.collect()  # what a recording has looked at refers to the parameters weakly, in cycles; then they could not be swapped
    return found
