"""Where a local tensor's elements lie in memory: in the order that its spec says, so that one card's views of it can be taken.

A spec's strides are those of the whole on one card. A shard has fewer elements, but its dims in the same order of strides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from onecard._torch.names import no_dispatch
from onecard.tensor.spec import Spec

LIMIT = 4096  # specs of which each of these is known


@lru_cache(LIMIT)
def expanded(spec: Spec) -> tuple[bool, ...]:
    """For each dim whether its elements are one in memory on one card."""
    return tuple(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True))


@lru_cache(LIMIT)
def place(spec: Spec) -> Callable[[Tensor], Tensor]:
    """What puts a local tensor in memory as the whole is on one card."""
    if overlaps(spec):
        return lambda local: local
    once = tuple(slice(0, 1) if one else slice(None) for one in expanded(spec))
    order = _outer_first(spec)
    if order == [*range(len(order))] and not any(expanded(spec)):
        return Tensor.contiguous
    back = [order.index(dim) for dim in range(len(order))]
    return lambda local: local[once].permute(order).contiguous().permute(back).expand(local.shape)


def _outer_first(spec: Spec) -> list[int]:
    return sorted(range(len(spec.stride)), key=lambda dim: -spec.stride[dim])


def placed(local: Tensor, spec: Spec) -> bool:
    """Whether a local tensor lies as ``place`` would put it. Broadcast dims (stride 0) fit any order."""
    step = 1 if local.numel() else 0
    for dim in reversed(_outer_first(spec)) if step else ():
        size, own = local.shape[dim], local.stride(dim)
        if size > 1 and own and not (spec.stride[dim] == 0 and spec.shape[dim] > 1):
            if own != step:
                return overlaps(spec)
            step *= size
    return True


def named(local: Tensor, spec: Spec) -> Tensor:
    """A whole tensor with the strides of its spec where they mean the same memory: they differ in dims of one element."""
    if local.stride() == spec.stride:
        return local
    pairs = list(zip(spec.shape, local.stride(), spec.stride, strict=True))
    if local.shape != spec.shape or any(a != b for n, a, b in pairs if n > 1):
        return local
    return local.as_strided(spec.shape, spec.stride, local.storage_offset())


@lru_cache(LIMIT)
def own_stride(spec: Spec) -> tuple[int, ...]:
    """Strides of a tensor's value in memory of its own: those that ``clone`` gives on one card."""
    with no_dispatch():  # asked once: whoever writes a step down would have it in the first one, and in no other
        return torch.empty_like(spec.meta()).stride()


@lru_cache(LIMIT)
def overlaps(spec: Spec) -> bool:
    """Whether different positions may be one element of memory, other than in expanded dims."""
    span = 1
    for step, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if step and size > 1:
            if step < span:
                return True
            span += (size - 1) * step
    return False
