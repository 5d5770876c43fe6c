"""Paddle's collectives on plain tensors: they fill what they are given, and autograd does not see them.

Their differentiable twins, which return what they make, are those of ``onecard.differentiable``. A tensor that requires
gradients is refused here, because its gradient would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base.warned import warn
from onecard.comm.issue import collectives, differentiable, plain, started
from onecard.comm.issue.by_gpu import way
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import CommunicationError


class ReduceOp:
    """Names of reductions, as of Paddle and torch."""

    SUM, MAX, MIN, PROD, AVG = "sum", "max", "min", "product", "avg"


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None, timeout: Any = None) -> Ranks:
    """A group of ranks of the world, all if none are named. Every rank may call it; only members meet.

    Source: ``paddle.distributed.new_group``.

    Example:
        >>> new_group([0]).nranks
        1
    """
    return of_ranks(ranks)


def get_group(id: int = 0) -> Ranks:
    """The group of all ranks."""
    return of_ranks()


def all_reduce(tensor: Tensor, op: str = ReduceOp.SUM, group: Ranks | None = None, sync_op: bool = True) -> Handle:
    """Fill a tensor on every rank with the reduction of all ranks' tensors.

    Args:
        sync_op: False: leave it under way; the result is there after ``wait()`` of what is returned.

    Source: ``paddle.distributed.all_reduce``.

    Example:
        >>> x = torch.ones(2)
        >>> _ = all_reduce(x)
        >>> x  # in a world of one
        tensor([1., 1.])
    """
    _no_gradient("all_reduce", tensor)
    handle = started.all_reduce(tensor, _all(group), _op(op), inplace=True, later=not sync_op)
    if handle.done() and (made := handle.wait()) is not tensor:
        tensor.copy_(made)
    return handle


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Ranks | None = None, sync_op: bool = True) -> Handle:
    """Fill a list with the tensors of all ranks, all of one shape.

    Source: ``paddle.distributed.all_gather``.
    """
    _no_gradient("all_gather", tensor)
    group = _all(group)
    joined = plain.all_gather(tensor.unsqueeze(0).contiguous(), group, 0)
    return _filled("all_gather", tensor_list, list(joined.unbind(0)))


def alltoall(
    in_tensor_list: Sequence[Tensor], out_tensor_list: list[Tensor], group: Ranks | None = None, sync_op: bool = True
) -> Handle:
    """Send tensor i of a list to rank i, and fill a list with what the ranks sent here, all of one shape.

    Source: ``paddle.distributed.alltoall``.
    """
    _no_gradient("all_to_all", *in_tensor_list)
    group = _all(group)
    _count("alltoall", in_tensor_list, group)
    whole = torch.stack(list(in_tensor_list))
    made = plain.all_to_all(whole, group, 0, 0) if group.size > 1 else whole
    return _filled("alltoall", out_tensor_list, list(made.unbind(0)))


def broadcast(tensor: Tensor, src: int = 0, group: Ranks | None = None, sync_op: bool = True) -> Handle:
    """Fill a tensor on every rank with that of rank ``src``, counted in the world.

    Source: ``paddle.distributed.broadcast``.
    """
    _no_gradient("broadcast", tensor)
    group = _all(group)
    return Handle.complete(plain.broadcast(tensor, group, _place(group, src, "broadcast")))


def reduce(
    tensor: Tensor, dst: int = 0, op: str = ReduceOp.SUM, group: Ranks | None = None, sync_op: bool = True
) -> Handle:
    """Fill the tensor of rank ``dst`` with the reduction of all ranks' tensors; the others keep theirs.

    Source: ``paddle.distributed.reduce``.
    """
    _no_gradient("reduce", tensor)
    group = _all(group)
    made = plain.all_reduce(tensor, group, _op(op), call="reduce")
    return Handle.complete(tensor.copy_(made) if group.index == _place(group, dst, "reduce") else tensor)


def reduce_scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor],
    op: str = ReduceOp.SUM,
    group: Ranks | None = None,
    sync_op: bool = True,
) -> Handle:
    """Fill a tensor with this rank's part of the reduction of all ranks' lists.

    Source: ``paddle.distributed.reduce_scatter``.
    """
    _no_gradient("reduce_scatter", *tensor_list)
    group = _all(group)
    _count("reduce_scatter", tensor_list, group)
    made = plain.reduce_scatter(torch.stack(list(tensor_list)), group, 0, op=_op(op))
    return Handle.complete(tensor.copy_(made[0]))


def scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Ranks | None = None,
    sync_op: bool = True,
) -> Handle:
    """Fill a tensor with the one for this rank in the list of rank ``src``.

    Source: ``paddle.distributed.scatter``.
    """
    group = _all(group)
    place = _place(group, src, "scatter")
    if group.index == place:
        _no_gradient("scatter", *(tensor_list or ()))
        _count("scatter", tensor_list or (), group)
        whole = torch.stack(list(tensor_list or ()))
    else:
        whole = tensor.new_empty((group.size, *tensor.shape))
    made = differentiable.scatter_parts(whole, place, 0, group, [1] * group.size)
    return Handle.complete(tensor.copy_(made[0]))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Ranks | None = None,
    sync_op: bool = True,
) -> Handle:
    """Fill the list of rank ``dst`` with the tensors of all ranks.

    Source: ``paddle.distributed.gather``.
    """
    _no_gradient("gather", tensor)
    group = _all(group)
    place = _place(group, dst, "gather")
    made = differentiable.gather_parts(tensor.unsqueeze(0), place, 0, group, [1] * group.size)
    if group.index != place:
        return Handle.complete(tensor)
    if gather_list is None:
        raise CommunicationError(f"gather: rank {dst} gives the list to be filled: gather(x, parts, dst={dst})")
    return _filled("gather", gather_list, list(made.unbind(0)))


def send(tensor: Tensor, dst: int = 0, group: Ranks | None = None, sync_op: bool = True, tag: int = 0) -> Handle:
    """Send a tensor to rank ``dst``, and go on when it has arrived.

    Source: ``paddle.distributed.send``.
    """
    handle = isend(tensor, dst, group, tag)
    if sync_op:
        handle.wait()
    return handle


def recv(tensor: Tensor, src: int = 0, group: Ranks | None = None, sync_op: bool = True, tag: int = 0) -> Handle:
    """Fill a tensor with one that rank ``src`` sends.

    Source: ``paddle.distributed.recv``.
    """
    handle = irecv(tensor, src, group, tag)
    if sync_op:
        handle.wait()
    return handle


def isend(tensor: Tensor, dst: int, group: Ranks | None = None, tag: int = 0) -> Handle:
    """Start sending a tensor to rank ``dst``. Nobody has to wait for it; do not write to it before it has arrived.

    Source: ``paddle.distributed.isend``.
    """
    _no_gradient("send", tensor)
    group = _all(group)
    _untagged("isend", tag, group)
    return started.isend(tensor, _place(group, dst, "isend"), tag, group)


def irecv(tensor: Tensor, src: int, group: Ranks | None = None, tag: int = 0) -> Handle:
    """Start filling a tensor with one that rank ``src`` sends under the tag; it is there after ``wait()``.

    Source: ``paddle.distributed.irecv``.
    """
    group = _all(group)
    _untagged("irecv", tag, group)
    return started.irecv(tensor, _place(group, src, "irecv"), tag, group)


def _untagged(call: str, tag: int, group: Ranks) -> None:
    if tag and group.process_group is not None and way(group.process_group) is not None:
        warn(
            f"{call}(tag={tag}): NCCL has no tags: messages between two ranks arrive in the order in which they are sent. "
            'Receive them in that order; or, for tensors on the CPU: init_process_group("cpu:gloo,cuda:nccl")',
        )


def all_gather_object(object_list: list[Any], obj: Any, group: Ranks | None = None) -> None:
    """Fill a list with the Python values of all ranks. They are pickled: only between ranks of one program.

    Source: ``paddle.distributed.all_gather_object``.
    """
    group = _all(group)
    object_list[:] = [collectives.broadcast_object(obj, group, place) for place in range(group.size)]


def wait(tensor: Tensor, group: Ranks | None = None, use_calc_stream: bool = True) -> None:
    """Nothing: messages are complete when their call or their handle's ``wait()`` returns. Paddle's call."""


def barrier(group: Ranks | None = None) -> None:
    """Wait until every rank of the group is here.

    Source: ``paddle.distributed.barrier``.
    """
    plain.barrier(_all(group))


def _no_gradient(call: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise CommunicationError(
            f"{call} fills a tensor, which autograd does not see, and was given one that requires gradients. The twin "
            f"that returns its result and has a gradient is onecard.differentiable.{call}; without gradients: "
            f"{call}(x.detach(), ...)"
        )


def _filled(call: str, given: list[Tensor], made: list[Tensor]) -> Handle:
    """Paddle's lists are empty, torch's hold tensors to be filled; both are understood."""
    if not given:
        given.extend(made)
    elif len(given) != len(made):
        raise CommunicationError(
            f"{call}: a list of {len(given)} is to be filled with {len(made)} tensors; give an empty one"
        )
    else:
        for into, part in zip(given, made, strict=True):
            into.copy_(part)
    return Handle.complete(torch.empty(0, device="cpu"))


def _count(call: str, given: Sequence[Tensor], group: Ranks) -> None:
    if len(given) != group.size:
        raise CommunicationError(f"{call} takes one tensor for each of {group.size} ranks, not {len(given)}")


def _place(group: Ranks, rank: int, call: str) -> int:
    if rank not in group.ranks:
        raise CommunicationError(
            f"{call}: rank {rank} is not one of ranks {list(group.ranks)}; it is a rank of the world"
        )
    return group.ranks.index(rank)


def _all(group: Ranks | None) -> Ranks:
    return of_ranks() if group is None else group


_OPS = ("sum", "avg", "max", "min", "product")


def _op(op: Any) -> str:
    """A reduction by our name, or torch's ``ReduceOp``."""
    found = str(op).rpartition(".")[2].lower()
    found = {"prod": "product", "mean": "avg"}.get(found, found)
    if found not in _OPS:
        raise CommunicationError(f"there is no reduction {op!r}; there are {', '.join(_OPS)}")
    return found
