"""Run the steps of a reshard on this rank's local tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecard.comm import collectives
from onecard.comm.groups import Group, group
from onecard.layout import Layout
from onecard.reductions import reduction
from onecard.resharding import Step


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


def _run_one(step: Step, local: Tensor, shape: Sequence[int], owned: bool) -> Tensor:
    line = group(step.source.mesh, step.axis)
    if line.size == 1:
        return local
    if step.inner is not None:
        made = _run_one(step.inner, local.reshape(step.inner.source.local_shape(step.opened)), step.opened, owned)
        return made.reshape(step.target.local_shape(shape))
    if step.kind == "all_reduce":
        return collectives.all_reduce(local, line, step.op, inplace=owned)
    if step.kind == "all_gather":
        return collectives.all_gather(local, line, step.dim, lengths(step.source, shape, step.dim, step.axis))
    if step.kind == "reduce_scatter":
        sizes = lengths(step.target, shape, step.dim, step.axis)
        return collectives.reduce_scatter(local, line, step.dim, sizes, step.op)
    if step.kind == "all_to_all":
        sizes = lengths(step.source, shape, step.dim, step.axis)
        to_sizes = lengths(step.target, shape, step.to_dim, step.axis)
        return collectives.all_to_all(local, line, step.dim, sizes, step.to_dim, to_sizes)
    if step.kind == "slice":
        sizes = lengths(step.target, shape, step.dim, step.axis)
        # A copy: shards stay contiguous (some kernels are wrong on strided ones) and do not keep the whole alive.
        return local.narrow(step.dim, sum(sizes[: line.index]), sizes[line.index]).clone(
            memory_format=torch.contiguous_format
        )
    return _fill(step, local, line)


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
