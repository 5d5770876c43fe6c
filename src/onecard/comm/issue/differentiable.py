"""Collectives as functions that autograd goes through, each with its transpose.

The ranks' program is one function of all their tensors, and what is differentiated is the *sum* of what the ranks call
``backward`` on. So the gradient of an all-gather is reduce-scattered, that of a broadcast is reduced, that of a message
travels back. A mean over ranks is this sum over their number: ``(loss / n).backward()``.

All can be differentiated again. ``group`` is all ranks of the world if left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.issue import plain, started
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import CommunicationError

Function = torch.autograd.Function


def all_reduce(x: Tensor, op: str = "sum", group: Ranks | None = None) -> Tensor:
    """The reduction of all ranks' tensors. Gradients: all-reduced likewise. ``op``: "sum" or "avg".

    Example:
        >>> all_reduce(torch.ones(2))  # in a world of one
        tensor([1., 1.])
    """
    if op not in ("sum", "avg"):
        raise CommunicationError(
            f"all_reduce({op!r}) has no gradient: differentiable are 'sum' and 'avg'; without gradients it is "
            f"onecard.all_reduce(x, op={op!r})"
        )
    return _AllReduce.apply(x, op, _all(group))


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, group: Ranks) -> Tensor:
        ctx.given = (op, group)
        return plain.all_reduce(x, group, op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllReduce.apply(grads[0], *ctx.given), None, None


def all_gather(x: Tensor, dim: int = 0, group: Ranks | None = None, sizes: Sequence[int] | None = None) -> Tensor:
    """All ranks' tensors joined along ``dim``; ``sizes``: their lengths, if not equal. Gradients: reduce-scattered."""
    group = _all(group)
    dim = plain.dim_of(x, dim, "all_gather")
    sizes = [x.shape[dim]] * group.size if sizes is None else sizes
    return _AllGather.apply(x, dim, group, list(sizes))


def reduce_scatter(x: Tensor, dim: int = 0, group: Ranks | None = None, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of the sum of all ranks' tensors. Gradients: all-gathered."""
    group = _all(group)
    dim = plain.dim_of(x, dim, "reduce_scatter")
    return _ReduceScatter.apply(x, dim, group, plain.cut_sizes(x, group, dim, sizes, "reduce_scatter"))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Ranks, sizes: list[int]) -> Tensor:
        ctx.given = (dim, group, sizes)
        return _fresh(plain.all_gather(x, group, dim, sizes), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceScatter.apply(grads[0], *ctx.given), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Ranks, sizes: list[int]) -> Tensor:
        ctx.given = (dim, group, sizes)
        return _fresh(plain.reduce_scatter(x, group, dim, sizes), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllGather.apply(grads[0], *ctx.given), None, None, None


def all_to_all(
    x: Tensor,
    dim: int,
    to_dim: int,
    group: Ranks | None = None,
    sizes: Sequence[int] | None = None,
    to_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Join along ``dim`` while cutting along ``to_dim``. Gradients: the other way round.

    Args:
        sizes: lengths along ``dim`` that the ranks hold; if ``dim == to_dim``, those that this rank receives.
        to_sizes: lengths along ``to_dim`` that go to each rank. Both equal if left out.
    """
    group = _all(group)
    dim, to_dim = plain.dim_of(x, dim, "all_to_all"), plain.dim_of(x, to_dim, "all_to_all")
    cut = plain.cut_sizes(x, group, to_dim, to_sizes, "all_to_all")
    if sizes is None:
        sizes = cut if dim == to_dim else [x.shape[dim]] * group.size
    return _AllToAll.apply(x, dim, to_dim, group, list(sizes), cut)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, to_dim: int, group: Ranks, sizes: Any, to_sizes: Any) -> Tensor:
        ctx.given = (to_dim, dim, group, to_sizes, sizes)
        return _fresh(plain.all_to_all(x, group, dim, to_dim, sizes, to_sizes), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllToAll.apply(grads[0], *ctx.given), None, None, None, None, None


def broadcast(x: Tensor, src: int = 0, group: Ranks | None = None) -> Tensor:
    """The tensor of the rank at place ``src``; the others give one of its shape. Gradients: summed there, zero elsewhere."""
    return _Broadcast.apply(x, src, _all(group))


def reduce(x: Tensor, dst: int = 0, group: Ranks | None = None) -> Tensor:
    """The sum of all ranks' tensors at place ``dst``; zeros elsewhere. Gradients: broadcast from there."""
    return _Reduce.apply(x, dst, _all(group))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Ranks) -> Tensor:
        ctx.given = (src, group)
        return plain.broadcast(x.clone(memory_format=torch.contiguous_format), group, src)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Reduce.apply(grads[0], *ctx.given), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, group: Ranks) -> Tensor:
        ctx.given = (dst, group)
        total = plain.all_reduce(x, group, call="reduce")
        return total if group.index == dst else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Broadcast.apply(grads[0], *ctx.given), None, None


def scatter(
    x: Tensor, src: int = 0, dim: int = 0, group: Ranks | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of the tensor at place ``src``; the others give one of its shape and dtype. Gradients: gathered."""
    group = _all(group)
    dim = plain.dim_of(x, dim, "scatter")
    return _Scatter.apply(x, src, dim, group, plain.cut_sizes(x, group, dim, sizes, "scatter"))


def gather(
    x: Tensor, dst: int = 0, dim: int = 0, group: Ranks | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' tensors joined at place ``dst``; elsewhere one of length 0 along ``dim``. Gradients: scattered."""
    group = _all(group)
    dim = plain.dim_of(x, dim, "gather")
    sizes = [x.shape[dim]] * group.size if sizes is None else plain.check_sizes(sizes, group, x.shape[dim], "gather")
    return _Gather.apply(x, dst, dim, group, list(sizes))


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, dim: int, group: Ranks, sizes: list[int]) -> Tensor:
        ctx.given = (src, dim, group, sizes)
        return scatter_parts(x, src, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        src, dim, group, sizes = ctx.given
        whole = _Gather.apply(grads[0], src, dim, group, sizes)
        return _filled(whole, dim, sizes), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, dim: int, group: Ranks, sizes: list[int]) -> Tensor:
        ctx.given = (dst, dim, group, sizes)
        return gather_parts(x, dst, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dst, dim, group, sizes = ctx.given
        return _Scatter.apply(_filled(grads[0], dim, sizes), dst, dim, group, sizes), None, None, None, None


_SCATTER, _GATHER = started.tag_of("scatter"), started.tag_of("gather")


def scatter_parts(x: Tensor, src: int, dim: int, group: Ranks, sizes: Sequence[int]) -> Tensor:
    """Part i of the tensor at ``src`` on rank i, without gradients."""
    parts = x.split(list(sizes), dim)
    if group.index != src:
        mine = torch.empty_like(parts[group.index], memory_format=torch.contiguous_format)
        return started.irecv(mine, src, _SCATTER, group, "scatter").wait()
    sends = [
        started.isend(part.contiguous(), place, _SCATTER, group, "scatter")
        for place, part in enumerate(parts)
        if place != src
    ]
    for send in sends:
        send.wait()
    return parts[src].clone(memory_format=torch.contiguous_format)


def gather_parts(x: Tensor, dst: int, dim: int, group: Ranks, sizes: Sequence[int]) -> Tensor:
    """All ranks' tensors joined on ``dst``, without gradients."""
    if group.index != dst:
        started.isend(x.contiguous(), dst, _GATHER, group, "gather").wait()
        return x.new_empty((*x.shape[:dim], 0, *x.shape[dim + 1 :]))
    parts = [x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :])) for size in sizes]
    receives = [
        started.irecv(part, place, _GATHER, group, "gather") for place, part in enumerate(parts) if place != dst
    ]
    for receive in receives:
        receive.wait()
    parts[dst] = x
    return torch.cat(parts, dim)


def send(x: Tensor, dst: int, tag: int = 0, group: Ranks | None = None) -> Tensor:
    """Send ``x`` to the rank at place ``dst``, without waiting for it.

    Returns:
        A number, 0: its ``backward`` waits for the gradient that comes back. Add it to this rank's loss, or call
        ``backward`` on it where this rank has none.
    """
    return _Send.apply(x, dst, tag, _all(group))


def recv(like: Tensor, src: int, tag: int = 0, group: Ranks | None = None) -> Tensor:
    """A new tensor that the rank at place ``src`` sends under the tag, of the shape and dtype of ``like``.

    Its gradient is sent back, under the same tag with one bit more.
    """
    return _Recv.apply(torch.empty((), requires_grad=True, device="cpu"), like.detach(), src, tag, _all(group))


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, tag: int, group: Ranks) -> Tensor:
        ctx.given = (dst, tag | started.BACK, group)
        ctx.like = torch.empty_like(x, device="meta")
        ctx.place = x.device
        started.isend(x.detach().clone(), dst, tag, group)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.place)
        dst, tag, group = ctx.given
        arrived = started.irecv(back, dst, tag, group, "gradient of send").wait()
        return arrived, None, None, None  # what the number is multiplied with, the other rank's loss is as well


class _Recv(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, src: int, tag: int, group: Ranks) -> Tensor:
        ctx.given = (src, tag | started.BACK, group)
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
        return started.irecv(made, src, tag, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        src, tag, group = ctx.given
        started.isend(grads[0].contiguous(), src, tag, group, "gradient of recv")
        return None, None, None, None, None


def _filled(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Zeros behind what has length 0: still a function of it, so that all ranks differentiate again together."""
    missing = sum(sizes) - x.shape[dim]
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def _fresh(result: Tensor, x: Tensor) -> Tensor:
    """In a group of one a collective gives back what it is given, which a function may not."""
    return result.view_as(result) if result is x else result


def _all(group: Ranks | None) -> Ranks:
    return of_ranks() if group is None else group
