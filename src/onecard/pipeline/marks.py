"""step_by_marks: a program whose parameters lie on several meshes, run in microbatches in the order of a schedule.

Every rank runs the whole program, as always; outside its own mesh nothing is there to compute. So the forward of a microbatch is,
on each rank, the forward of its stage, and receives and sends are where the program moves values from mesh to mesh. What a
schedule says is in which order this rank goes through forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard.comm import world
from onecard.comm.transfer import sends_under_way
from onecard.errors import ScheduleError
from onecard.mesh import ProcessMesh
from onecard.pipeline import batches, shares
from onecard.pipeline.action import Schedule
from onecard.pipeline.check import check_schedule
from onecard.pipeline.modes import plan
from onecard.pipeline.packets import batch_size, split
from onecard.pipeline.stage import one_number
from onecard.tensor.dist_tensor import DistTensor


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
            for each mesh and whole backwards: naive, F-then-B, 1F1B, Eager1F1B, or one's own.
        microbatches: how many; sizes as equal as can be.
        stages: the meshes, first stage first; those of the parameters, in their order, if left out.
        loss_weight: labels of a microbatch -> what its loss is a mean over, where that cannot be seen.

    Returns:
        The loss of the batch, where the last stage has it (``oc.unshard(loss)`` on every rank).

    Raises:
        ScheduleError: a schedule that does not fit the meshes, or one that halves backwards or gives a mesh several stages; a
            loss of which nobody can see what it is a mean over.
    """
    meshes = list(stages) if stages is not None else _meshes(model)
    chosen = plan(schedule, len(meshes))(microbatches)
    check_schedule(chosen)
    row = _row(chosen, meshes)
    size = batch_size(inputs)
    if chosen.num_microbatches > size:
        raise ScheduleError(
            f"a batch of {size} does not make {chosen.num_microbatches} microbatches of 1 sample or more"
        )
    count = chosen.num_microbatches
    sizes = [size // count + (i < size % count) for i in range(count)]
    xs, ys = split(inputs, sizes, "the inputs"), split(targets, sizes, "the targets")
    batches.compare_stages(meshes, inputs, targets)
    weights = None if loss_weight is None else [loss_weight(y) / loss_weight(targets) for y in ys]
    under_way: dict[int, Tensor | None] = {}
    total: Tensor | None = None
    with torch.enable_grad(), sends_under_way():
        for kind, _, i in row:
            if kind == "F":
                out = model(xs[i])
                if weights is None:
                    weights = shares.shares_of(loss_fn).of(out, i, ys, targets, sizes)
                under_way[i] = _weighted(loss_fn, out, ys[i], weights[i])
            elif (loss := under_way.pop(i)) is not None:
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
    if total is None:
        raise ScheduleError(f"{chosen.name}: nothing to do on rank {world.get_rank()}")
    return total


def _weighted(loss_fn: Callable[[Any, Any], Any], out: Any, labels: Any, weight: Any) -> Tensor | None:
    """A microbatch's part of the loss; None of one that has no part in it, on all ranks alike."""
    if isinstance(weight, Tensor) and recorded.recorder is not None:  # a replay has other labels
        loss = one_number(loss_fn(out, labels))
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight
    return one_number(loss_fn(out, labels)) * float(weight) if weight else None


def _meshes(model: nn.Module) -> list[ProcessMesh]:
    """Those of the parameters, in the order of the model."""
    found = list(dict.fromkeys(p.process_mesh for p in model.parameters() if isinstance(p, DistTensor)))
    if len(found) < 2:
        raise ScheduleError(
            f"the parameters of {type(model).__name__} lie on {len(found)} mesh(es): a pipeline by marks has one for each stage: "
            'oc.shard_layer(part, oc.ProcessMesh([0], ["pp"])), and oc.reshard between them; or say stages=[mesh, ...]'
        )
    return found


def _row(schedule: Schedule, meshes: list[ProcessMesh]) -> list[Any]:
    """What this rank does, in order: that of the stage whose mesh it is in, or of the first, where it has nothing to do."""
    kinds = {action.kind for row in schedule.ranks for action in row if action.is_compute}
    if kinds - {"F", "B"} or schedule.num_stages != len(meshes) or len(schedule.ranks) != len(meshes):
        what = (
            "halves backwards"
            if kinds - {"F", "B"}
            else f"is for {len(schedule.ranks)} ranks and {schedule.num_stages} stages"
        )
        raise ScheduleError(
            f"{schedule.name} {what}; by marks there are {len(meshes)} meshes, with one stage each and whole backwards: 1F1B, "
            "F-then-B, naive or Eager1F1B. fleet.PipelineLayer runs all schedules"
        )
    here = [number for number, mesh in enumerate(meshes) if world.get_rank() in mesh.process_ids]
    if len(here) > 1:
        raise ScheduleError(
            f"rank {world.get_rank()} is in the meshes of stages {here}: by marks each rank has one stage, and so "
            "the meshes of stages have no rank in common"
        )
    place = here[0] if here else 0
    return [action for action in schedule.ranks[place] if action.is_compute]
