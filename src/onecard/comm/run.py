"""Run the steps of a reshard on this rank's local tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecard.comm import collectives, forms, started
from onecard.comm.groups import Group, group
from onecard.comm.started import Started
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


def messages(steps: Sequence[Step]) -> list[int]:
    """Which of the steps send something."""
    return [i for i, s in enumerate(steps) if s.kind not in ("slice", "fill") and s.source.mesh.shape[s.axis] > 1]


def start(steps: Sequence[Step], local: Tensor, shape: Sequence[int]) -> Started:
    """``run`` with its last message, of at least one, left under way. What this rank does alone after that is done when it is
    awaited.

    ``local`` may be written to meanwhile: what is sent is a copy.
    """
    last = messages(steps)[-1]
    coming = _start_one(steps[last], run(steps[:last], local, shape), shape)
    return coming.then(lambda made: run(steps[last + 1 :], made, shape, owned=True))


def _start_one(step: Step, local: Tensor, shape: Sequence[int]) -> Started:
    line = group(step.source.mesh, step.axis)
    if step.inner is not None:
        opened = local.reshape(step.inner.source.local_shape(step.opened))
        coming = _start_one(step.inner, opened, step.opened)
        return coming.then(lambda made: made.reshape(step.target.local_shape(shape)))
    if step.kind == "all_reduce":
        return started.reduced(local, line, step.op)
    sizes = lengths(step.target if step.kind == "reduce_scatter" else step.source, shape, step.dim, step.axis)
    if step.kind == "reduce_scatter":
        return started.scattered(local.clone(), line, step.dim, sizes, step.op)
    to_sizes = lengths(step.target, shape, step.to_dim, step.axis) if step.kind == "all_to_all" else ()
    known = local.dtype in forms.NATIVE and 0 not in (*sizes, *to_sizes, *local.shape)
    if not known or not started.can_wait(local, line):
        return Started.complete(_run_one(step, local, shape, False))
    if step.kind == "all_gather":
        mine = collectives.padded(local.clone(), step.dim, max(sizes))
        into = mine.new_empty((line.size * mine.shape[0], *mine.shape[1:]))
        coming = started.gathered(mine, into, line)
        return coming.then(lambda whole: collectives.joined(whole, line, step.dim, sizes))
    flat, arrive, leave, whole = collectives.exchange_of(local, line, step.dim, sizes, step.to_dim, to_sizes)
    coming = started.exchanged(flat, line, arrive, leave)
    return coming.then(lambda came: collectives.arrived(came, whole, line, step.dim, sizes))


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
