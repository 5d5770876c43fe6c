"""Megatron's operators between what is cut and what every rank holds alike; all for programs whose ranks share one loss.

They are not transposes in the sense of ``onecard.differentiable``, which sums over the ranks' losses: here a value that all
ranks hold is *one* value, and so is its gradient.

Source: Shoeybi et al., "Megatron-LM" (2019), f and g; Korthikanti et al., "Reducing activation recomputation" (2022), g-bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.fleet.layers.parameters import part_sizes

Function = torch.autograd.Function


def _mp(group: Ranks | None) -> Ranks:
    """A group; without one the ranks along mp, as in Megatron, whose functions have no group."""
    from onecard.fleet.grid.topology import get_hybrid_communicate_group

    return get_hybrid_communicate_group().group("mp") if group is None else group


def copy_to(x: Tensor, group: Ranks | None = None) -> Tensor:
    """The value, for use by layers that are cut; its gradient is summed over the ranks (f)."""
    group = _mp(group)
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Ranks | None = None) -> Tensor:
    """The sum of the ranks' summands; the gradient of each is that of the sum (g)."""
    group = _mp(group)
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, group: Ranks | None = None, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """The parts joined; the gradient is cut."""
    group = _mp(group)
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim % x.dim(), sizes)


def scatter_to(x: Tensor, group: Ranks | None = None, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part of what all hold; the gradients are joined."""
    group = _mp(group)
    if group.size == 1:
        return x
    return _ScatterTo.apply(x, group, dim % x.dim(), sizes or part_sizes(x.shape[dim], group.size))


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceFrom.apply(grads[0], ctx.group), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        y = plain.all_reduce(x, group, call="reduce_from")
        recorded.alike(y, group.ranks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _CopyTo.apply(grads[0], ctx.group), None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks, dim: int, sizes: Any) -> Tensor:
        ctx.given = (group, dim, sizes or [x.shape[dim]] * group.size)
        y = plain.all_gather(x, group, dim, sizes, call="gather_from")
        recorded.alike(y, group.ranks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ScatterTo.apply(grads[0], *ctx.given), None, None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks, dim: int, sizes: Any) -> Tensor:
        ctx.given = (group, dim, sizes)
        return x.narrow(dim, sum(sizes[: group.index]), sizes[group.index]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _GatherFrom.apply(grads[0], *ctx.given), None, None, None
