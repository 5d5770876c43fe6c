"""Programs whose parameters lie on several meshes, run in microbatches in the order of a schedule.

Every rank runs the whole program, as always; outside its own meshes nothing is there to compute. So the forward of a microbatch
is, on each rank, the forward of its stages, and receives and sends are where the program moves values from mesh to mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.names import tree_leaves
from onecard.comm.agree.joint import joint_step
from onecard.comm.world import world
from onecard.errors import ScheduleError
from onecard.pipeline.run import batches, no_graph, shares
from onecard.pipeline.run.crossings import MarkedMicrobatch, Route
from onecard.pipeline.run.packets import split
from onecard.pipeline.run.runtime import Runtime, Walk
from onecard.pipeline.run.stage import one_number
from onecard.pipeline.run.waiting_hooks import hooks_wait
from onecard.pipeline.schedule.action import Action, Schedule
from onecard.pipeline.schedule.modes import plan
from onecard.pipeline.schedule.schedule_messages import one_order
from onecard.place.mesh import ProcessMesh
from onecard.tensor.dist_tensor import DistTensor


class MarkedRunner(Runtime):
    """Runs a program whose parameters lie on several meshes under schedules; what it measures is kept from step to step.

    Args:
        model: with parameters on several meshes, and ``oc.reshard`` between them.
        loss_fn: (what the model returns, labels) -> one number, a sum or a mean: over samples, or over what its labels say
            counts (ignored labels, masks, weights of classes).
        stages: the meshes, first stage first; those of the parameters, in their order, if left out. A mesh that comes again has
            several stages, as interleaved schedules want it: ``[first, second, first, second]``.
        loss_weight: labels of a microbatch -> what its loss is a mean over, where that cannot be seen.

    Example:
        >>> import onecard as oc
        >>> with oc.pretend(2, rank=1):
        ...     meshes = [oc.ProcessMesh([0], ["pp"]), oc.ProcessMesh([1], ["pp"])]
        ...     net = nn.Sequential(*(oc.shard_layer(nn.Linear(3, 3), mesh) for mesh in meshes))
        ...     def forward(x):
        ...         x = net[0](oc.reshard(x, meshes[0], [oc.Replicate()]))
        ...         return net[1](oc.reshard(x, meshes[1], [oc.Replicate()]))
        ...     runner = MarkedRunner(forward, nn.functional.mse_loss, stages=meshes)
        ...     loss = runner.step(torch.ones(4, 3), torch.ones(4, 3), "ZBH1", microbatches=2)
        ...     [span.action for span in runner.timeline().spans]
        [1F0, 1I0, 1F1, 1I1, 1W0, 1W1]
    """

    def __init__(
        self,
        model: Callable[[Any], Any],
        loss_fn: Callable[[Any, Any], Tensor],
        stages: Sequence[ProcessMesh] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
    ) -> None:
        self.meshes = list(stages) if stages is not None else _meshes(model)
        self.route = Route(self.meshes)
        _apart(self.route)
        place = _place(self.route)
        super().__init__(place, len(self.route.places), self.route.stages_of(place))
        self.model, self.loss_fn, self.loss_weight = model, loss_fn, loss_weight

    def step(self, inputs: Any, targets: Any, schedule: Any = "1F1B", microbatches: int = 4) -> Tensor:
        """Forward and backward of a batch; see ``step_by_marks``."""
        chosen = self.schedule(schedule, microbatches)
        ranks = sorted({rank for mesh in self.meshes for rank in mesh.process_ids})
        with joint_step("a step by marks", ranks), torch.enable_grad(), hooks_wait(_parameters(self.model)):
            walk = _MarkedWalk(self, chosen, inputs, targets)
            walk.go_through()
        no_graph.last.here = "step_by_marks"
        return walk.loss()

    def schedule(self, schedule: Any, microbatches: int) -> Schedule:
        """The schedule that a name, or a function, means here; proved.

        Raises:
            ScheduleError: it does not fit the meshes.
        """
        ranks, stages = len(self.route.places), self.route.stages
        chunks = stages // ranks if stages > ranks and stages % ranks == 0 else None
        chosen = plan(schedule, ranks, chunks)(microbatches)
        homes = [chosen.stage_to_rank.get(stage) for stage in range(chosen.num_stages)]
        there = [self.route.place_at(stage) for stage in range(stages)]
        if homes != there or len(chosen.ranks) != ranks:
            raise ScheduleError(
                f"{chosen.name} has stages on places {homes} of {len(chosen.ranks)}, the meshes of this program are {there}: "
                f"{_several(homes)}"
            )
        self.fit(chosen)
        if world.device().type == "cuda":  # where messages have no tags
            one_order(chosen)
        return chosen


def _apart(route: Route) -> None:
    """ScheduleError if nothing says where a stage ends."""
    places = [route.place_at(stage) for stage in range(route.stages)]
    for stage, (here, there) in enumerate(pairwise(places)):
        if here == there:
            raise ScheduleError(f"stages {stage} and {stage + 1} lie on one mesh, and {_NO_END}")


_NO_END = (
    'nothing in a program by marks says where one ends: schedule="VPP" with stages=[first, second, first, second], or ZBH1 '
    "with one stage for each mesh; fleet.PipelineLayer runs all schedules"
)


def _several(homes: list[int | None]) -> str:
    """What to do about a schedule whose stages are not those of the meshes."""
    if any(a == b for a, b in pairwise(homes)):
        return f"two stages that follow each other lie on one place, and {_NO_END}"
    if len(homes) > len(set(homes)):
        return "give the mesh of each stage, first stage first: stages=[first, second, first, second]"
    return "give a schedule with one stage for each mesh, such as 1F1B, F-then-B or ZBH1"


def step_by_marks(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    schedule: Any = "1F1B",
    microbatches: int = 4,
    stages: Sequence[ProcessMesh] | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
) -> Tensor:
    """In place of ``loss = loss_fn(model(inputs), targets); loss.backward()``: the same numbers, in microbatches.

    Args:
        model: with parameters on several meshes, and ``oc.reshard`` between them.
        loss_fn: (what the model returns, labels) -> one number, a sum or a mean: over samples, or over what its labels say
            counts (ignored labels, masks, weights of classes).
        inputs, targets: the whole batch, plain tensors; the program marks them as it does without a schedule.
        schedule: a name of ``pipeline.modes.MODES``, a Schedule, or a function (ranks, microbatches) -> Schedule, with one stage
            for each mesh of ``stages``; also those that halve backwards, such as ZBH1.
        microbatches: how many; sizes as equal as can be.
        stages: the meshes, first stage first; those of the parameters, in their order, if left out. A mesh that comes again has
            several stages, as VPP wants it.
        loss_weight: labels of a microbatch -> what its loss is a mean over, where that cannot be seen.

    Returns:
        The loss of the batch, where the last stage has it (``oc.unshard(loss)`` on every rank).

    Raises:
        ScheduleError: a schedule that does not fit the meshes; a loss of which nobody can see what it is a mean over.
    """
    return MarkedRunner(model, loss_fn, stages, loss_weight).step(inputs, targets, schedule, microbatches)


class _MarkedWalk(Walk):
    """One step: the microbatches that are under way."""

    def __init__(self, runner: MarkedRunner, schedule: Schedule, inputs: Any, targets: Any) -> None:
        row = [action for action in schedule.ranks[runner.place] if action.is_compute]
        super().__init__(runner, schedule, row, inputs, None)
        if runner.route.comes_again and recorded.recorder is not None:
            raise ScheduleError(
                f"{schedule.name}: a step in which a mesh has several stages cannot be recorded, as its microbatches run in "
                "turns: a schedule with one stage for each mesh, such as 1F1B or ZBH1, or the step without to_static"
            )
        self.runner = runner
        self.whole, self.targets = targets, split(targets, self.sizes, "the targets")
        batches.compare_stages(runner.meshes, inputs, targets)
        weigh = runner.loss_weight
        self.weights: list[Any] | None = None if weigh is None else [weigh(y) / weigh(targets) for y in self.targets]
        if runner.meter is not None:
            runner.meter.leave_out(x for x in tree_leaves((inputs, targets)) if isinstance(x, Tensor))
        self.microbatches: dict[int, MarkedMicrobatch] = {}
        self.do = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight}

    def loss(self) -> Tensor:
        """That of the batch."""
        losses = [self.microbatches[i].loss for i in sorted(self.microbatches)]
        found = [loss for loss in losses if loss is not None]
        if not found:
            raise ScheduleError(f"{self.schedule.name}: nothing to do on rank {world.get_rank()}")
        total = found[0]
        for loss in found[1:]:
            total = total + loss
        return total

    def go_through(self) -> None:
        try:
            super().go_through()
        except BaseException:
            for microbatch in self.microbatches.values():
                microbatch.forget()
            raise

    def finish(self) -> None:
        for _, microbatch in sorted(self.microbatches.items()):
            microbatch.end()

    def _program(self, i: int) -> Tensor | None:
        out = self.runner.model(self.inputs[i])
        if self.runner.loss_weight is None:
            seen = shares.shares_of(self.runner.loss_fn)
            loss, self.weights = seen.lose(out, i, self.targets, self.whole, self.sizes, self.weights)
        else:
            assert self.weights is not None
            loss = self.runner.loss_fn(out, self.targets[i]) if _is_there(self.weights[i]) else None
        return None if loss is None else _weighted(one_number(loss), self.weights[i])

    def _forward(self, position: int, action: Action) -> None:
        _, stage, i = action
        if i not in self.microbatches:
            program = partial(self._program, i)
            self.microbatches[i] = MarkedMicrobatch(self.runner.route, i, self.runner.mine, program)
        self.microbatches[i].forward(partial(self.counted, stage))
        self.note(action, self.microbatches[i].began)

    def _backward(self, position: int, action: Action) -> None:
        microbatch = self.microbatches[action.microbatch]
        microbatch.backward(action.stage, action.kind == "I")
        self.note(action, microbatch.began)

    def _weight(self, position: int, action: Action) -> None:
        microbatch = self.microbatches[action.microbatch]
        microbatch.backward_weight(action.stage)
        self.note(action, microbatch.began)


def _is_there(weight: Any) -> bool:
    """Whether a microbatch has a part in the loss, on all ranks alike; a replay of a recording asks itself."""
    return (isinstance(weight, Tensor) and recorded.recorder is not None) or bool(weight)


def _weighted(loss: Tensor, weight: Any) -> Tensor:
    """A microbatch's part of the loss."""
    if isinstance(weight, Tensor) and recorded.recorder is not None:  # a replay has other labels
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight
    return loss * float(weight)


def _meshes(model: Any) -> list[ProcessMesh]:
    """Those of the parameters, in the order of the model."""
    found = list(dict.fromkeys(p.process_mesh for p in _parameters(model) if isinstance(p, DistTensor)))
    if len(found) < 2:
        raise ScheduleError(
            f"the parameters of {type(model).__name__} lie on {len(found)} mesh(es): a pipeline by marks has one for each stage: "
            'oc.shard_layer(part, oc.ProcessMesh([0], ["pp"])), and oc.reshard between them; or say stages=[mesh, ...]'
        )
    return found


def _parameters(model: Any) -> list[Tensor]:
    return list(model.parameters()) if isinstance(model, nn.Module) else []


def _place(route: Route) -> int:
    """That of this rank, whose row it goes through; the first for a rank that has nothing to do."""
    here = route.place_of(world.get_rank())
    if len(here) > 1:
        raise ScheduleError(
            f"rank {world.get_rank()} is in the meshes {here}, of different ranks: by marks the meshes of stages are equal or "
            "have no rank in common"
        )
    return here[0] if here else 0
