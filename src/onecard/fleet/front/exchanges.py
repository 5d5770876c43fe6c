"""Paddle's and torch's collectives on Python values, on parts of one tensor, and on lists of sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onecard.comm.issue import collectives, plain, started
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.fleet.front import collective


def is_initialized() -> bool:
    """Whether the ranks have met: the first message, or ``fleet.init``, makes them."""
    return world.has_met()


def get_backend(group: Ranks | None = None) -> str:
    """What carries messages: "shm", "gloo", "nccl". The ranks meet if they have not.

    Source: ``paddle.distributed.get_backend``.
    """
    return collectives.backend_of(collective._all(group))


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Ranks | None = None) -> None:
    """Fill a list on every rank with the Python values of rank ``src``. They are pickled: only between ranks of one program.

    Source: ``paddle.distributed.broadcast_object_list``.

    Example:
        >>> values = [{"step": 3}, "on"]
        >>> broadcast_object_list(values)
        >>> values  # in a world of one
        [{'step': 3}, 'on']
    """
    group = collective._all(group)
    place = collective._place(group, src, "broadcast_object_list")
    object_list[:] = collectives.broadcast_object(list(object_list), group, place)


def scatter_object_list(
    out_object_list: list[Any], in_object_list: Sequence[Any] | None = None, src: int = 0, group: Ranks | None = None
) -> None:
    """Fill a list with the Python value for this rank in the list of rank ``src``. All of them travel to all.

    Source: ``paddle.distributed.scatter_object_list``.
    """
    group = collective._all(group)
    place = collective._place(group, src, "scatter_object_list")
    given = list(in_object_list or ()) if group.index == place else []
    made = collectives.broadcast_object(given, group, place)
    if len(made) != group.size:
        raise CommunicationError(
            f"scatter_object_list takes one value for each of {group.size} ranks, and rank {src} gives {len(made)}"
        )
    out_object_list[:] = [made[group.index]]


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
    group: Ranks | None = None,
    sync_op: bool = True,
) -> Handle:
    """Fill a tensor with the parts that the ranks send here, one after the other; part i of ``in_tensor`` goes to rank i.

    Args:
        in_split_sizes: rows of the parts that are sent, equal ones if left out; ``out_split_sizes``: of those that come.

    Source: ``paddle.distributed.alltoall_single``.
    """
    collective._no_gradient("all_to_all", in_tensor)
    group = collective._all(group)
    for what, x, sizes in (("in", in_tensor, in_split_sizes), ("out", out_tensor, out_split_sizes)):
        rows = x.shape[0] if x.dim() else 0
        fits = not rows % group.size if not sizes else len(sizes) == group.size and sum(sizes) == rows
        if not x.dim() or not fits:
            raise CommunicationError(
                f"alltoall_single: {what}_tensor {list(x.shape)} is not {list(sizes) if sizes else 'equal'} parts, one for each "
                f"of {group.size} ranks: give {what}_split_sizes, rows for each"
            )
    leave = list(in_split_sizes or [in_tensor.shape[0] // group.size] * group.size)
    come = list(out_split_sizes or [out_tensor.shape[0] // group.size] * group.size)
    if group.size == 1:
        return Handle.complete(out_tensor.copy_(in_tensor))
    made = plain.all_to_all(in_tensor.contiguous(), group, 0, 0, come, leave, call="alltoall_single")
    return Handle.complete(out_tensor.copy_(made))


@dataclass(frozen=True)
class P2POp:
    """One send or receive of ``batch_isend_irecv``.

    Attributes:
        op: ``oc.isend`` or ``oc.irecv``.
        peer: the rank at the other end, counted in the world.

    Source: ``paddle.distributed.P2POp``.
    """

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Ranks | None = None
    tag: int = 0

    def __post_init__(self) -> None:
        if getattr(self.op, "__name__", "") not in ("isend", "irecv"):
            raise CommunicationError(f"P2POp(op=...) is oc.isend or oc.irecv, not {self.op!r}")


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Start sends and receives together, in any order; ``wait()`` of each that is returned.

    Source: ``paddle.distributed.batch_isend_irecv``.

    Example:
        >>> batch_isend_irecv([])
        []
    """
    begin = {"isend": collective.isend, "irecv": collective.irecv}
    groups = {id(each.group): each.group for each in p2p_op_list}
    if not any(each.tensor.is_cuda for each in p2p_op_list):
        return [begin[each.op.__name__](each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]
    if len(groups) > 1 or not all(each.tensor.is_cuda and each.tensor.is_contiguous() for each in p2p_op_list):
        raise CommunicationError(
            "batch_isend_irecv of tensors on GPUs: NCCL is told of all at once: of one group, contiguous, all on one; call it "
            "once for each group"
        )
    (given,) = groups.values()
    group = collective._all(given)
    asked = [
        (each.op.__name__[1:], each.tensor, collective._place(group, each.peer, "batch_isend_irecv"))
        for each in p2p_op_list
    ]
    return started.together(asked, group, 0, "batch_isend_irecv")
