"""Run the steps of a reshard on this rank's local tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecard.comm.issue import collectives
from onecard.comm.issue.groups import Group, group
from onecard.comm.issue.handle import Handle
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.reductions import reduction


def run(steps: Sequence[Step], local: Tensor, shape: Sequence[int], owned: bool = False) -> Tensor:
    """The local tensor after a chain of steps.

    Args:
        steps: from ``resharding.plan``.
        local: this rank's shard before them.
        shape: the whole tensor's shape.
        owned: nobody else sees ``local``'s memory, so it may be overwritten.
    """
    for step in steps:
        after = _run_one(step, local, shape, owned)
        owned, local = after is not local or owned, after
    return local


def messages(steps: Sequence[Step]) -> list[int]:
    """Which of the steps send something."""
    return [i for i, s in enumerate(steps) if s.kind not in ("slice", "fill") and s.source.mesh.shape[s.axis] > 1]


def start(steps: Sequence[Step], local: Tensor, shape: Sequence[int]) -> Handle:
    """``run`` with its last message, of at least one, left under way. What this rank does alone after that is done when it is
    awaited.

    ``local`` may be written to meanwhile: what is sent is a copy.
    """
    last = messages(steps)[-1]
    coming = _message(steps[last], run(steps[:last], local, shape), shape, later=True)
    return coming.then(lambda made: run(steps[last + 1 :], made, shape, owned=True))


def run_or_start(steps: Sequence[Step], owned: Tensor, shape: Sequence[int], later: bool) -> Handle:
    """A chain with a message, its last one left under way if asked for; nobody else sees ``owned``."""
    return start(steps, owned, shape) if later else Handle.complete(run(steps, owned, shape, owned=True))


def _run_one(step: Step, local: Tensor, shape: Sequence[int], owned: bool) -> Tensor:
    line = group(step.source.mesh, step.axis)
    if line.size == 1:
        return local
    if step.inner is not None:
        made = _run_one(step.inner, local.reshape(step.inner.source.local_shape(step.opened)), step.opened, owned)
        return made.reshape(step.target.local_shape(shape))
    if step.kind == "fill":
        return _fill(step, local, line)
    if step.kind != "slice":
        return _message(step, local, shape, owned).wait()
    sizes = lengths(step.target, shape, step.dim, step.axis)
    # A copy: shards stay contiguous (some kernels are wrong on strided ones) and do not keep the whole alive.
    return local.narrow(step.dim, sum(sizes[: line.index]), sizes[line.index]).clone(
        memory_format=torch.contiguous_format
    )


def _message(step: Step, local: Tensor, shape: Sequence[int], owned: bool = False, later: bool = False) -> Handle:
    """One step that sends. ``later``: leave it under way; ``local`` may be written to."""
    line = group(step.source.mesh, step.axis)
    if step.inner is not None:
        opened = local.reshape(step.inner.source.local_shape(step.opened))
        made = _message(step.inner, opened, step.opened, owned, later)
        return made.then(lambda made: made.reshape(step.target.local_shape(shape)))
    if step.kind == "all_reduce":
        return collectives.reduced(local, line, step.op, owned, later)
    if later and step.kind != "all_to_all":  # which packs what it sends
        local = local.clone()
    if step.kind == "all_gather":
        return collectives.gathered(
            local, line, step.dim, lengths(step.source, shape, step.dim, step.axis), later=later
        )
    sizes = lengths(step.target if step.kind == "reduce_scatter" else step.source, shape, step.dim, step.axis)
    if step.kind == "reduce_scatter":
        return collectives.scattered(local, line, step.dim, sizes, step.op, later=later)
    to_sizes = lengths(step.target, shape, step.to_dim, step.axis)
    return collectives.turned(local, line, step.dim, sizes, step.to_dim, to_sizes, later)


def _fill(step: Step, local: Tensor, line: Group) -> Tensor:
    """Make a replicated value pending: the reduction of what the ranks now hold gives it back.

    All ranks but the first hold the identity of the reduction: one element, broadcast to the shape, so that it takes no
    memory. It must be copied before it is written to.
    """
    found = reduction(step.op)
    if found.idempotent or found.identity is None or line.index == 0:
        return local
    return local.new_full((), found.identity(local.dtype)).expand(local.shape)


def lengths(layout: Layout, shape: Sequence[int], dim: int, axis: int) -> list[int]:
    """The lengths of ``dim`` on each rank along an axis through this process."""
    place = layout.mesh.coordinate() or (0,) * layout.mesh.ndim
    return [
        layout.bounds(shape, dim, (*place[:axis], i, *place[axis + 1 :]))[1] for i in range(layout.mesh.shape[axis])
    ]
