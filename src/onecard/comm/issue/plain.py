"""Collectives on plain tensors, as a program asks for them: each is shown to who watches, and then runs.

A rank outside the group may not call them. ``call`` names what the message is for: the layer, or the collective itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives
from onecard.comm.issue.ranks import Ranks
from onecard.errors import CommunicationError
from onecard.machine.cost import sent
from onecard.moves.resharding import Step
from onecard.place.layout import Layout

_R = Replicate()


class Move(NamedTuple):
    """What a collective makes of a tensor, for those who watch.

    Attributes:
        kind: of collective.
        source, target: the placements before and after it.
        dim, to_dim: the dims that it joins and cuts.
        op: how it reduces.
        length: of ``dim``, of all ranks' parts together; -1: as the tensor has it.
    """

    kind: str
    source: Placement
    target: Placement
    dim: int = -1
    to_dim: int = -1
    op: str = ""
    length: int = -1


SEND = Move("send", _R, _R)
_BROADCAST = Move("broadcast", _R, _R)


@lru_cache(maxsize=64)
def reduces(op: str) -> Move:
    """An all-reduce."""
    return Move("all_reduce", Partial(op), _R, op=op)


def all_reduce(x: Tensor, group: Ranks, op: str = "sum", inplace: bool = False, call: str = "all_reduce") -> Tensor:
    """The reduction of all ranks' tensors, on every rank. ``op`` as in ``Partial``."""
    begin(reduces(op), group, x, call)
    return collectives.all_reduce(x, group, op, inplace)


def all_gather(
    x: Tensor, group: Ranks, dim: int = 0, sizes: Sequence[int] | None = None, call: str = "all_gather"
) -> Tensor:
    """The ranks' tensors joined along ``dim``; ``sizes`` are their lengths along it, all equal if left out."""
    dim, sizes = gathers(x, group, dim, sizes, call)
    return collectives.all_gather(x, group, dim, sizes)


def gathers(x: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None, call: str) -> tuple[int, Sequence[int]]:
    """Check an all-gather and tell of it; its dim and sizes."""
    dim = dim_of(x, dim, "all_gather")
    sizes = [x.shape[dim]] * group.size if sizes is None else check_sizes(sizes, group, x.shape[dim], "all_gather")
    begin(Move("all_gather", Shard(dim), _R, dim, length=sum(sizes)), group, x, call)
    return dim, sizes


def reduce_scatter(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    call: str = "reduce_scatter",
) -> Tensor:
    """This rank's part along ``dim`` of the reduction of all ranks' tensors."""
    dim, sizes = scatters(x, group, dim, sizes, op, call)
    return collectives.reduce_scatter(x, group, dim, sizes, op)


def scatters(
    x: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None, op: str, call: str
) -> tuple[int, Sequence[int]]:
    """Check a reduce-scatter and tell of it; its dim and sizes."""
    dim = dim_of(x, dim, "reduce_scatter")
    sizes = cut_sizes(x, group, dim, sizes, "reduce_scatter")
    begin(Move("reduce_scatter", Partial(op), Shard(dim), dim, op=op), group, x, call)
    return dim, sizes


def all_to_all(
    x: Tensor,
    group: Ranks,
    dim: int,
    to_dim: int,
    sizes: Sequence[int] | None = None,
    to_sizes: Sequence[int] | None = None,
    call: str = "all_to_all",
) -> Tensor:
    """Join along ``dim`` while cutting along ``to_dim``: part i along ``to_dim`` goes to rank i."""
    dim, to_dim = dim_of(x, dim, "all_to_all"), dim_of(x, to_dim, "all_to_all")
    if dim == to_dim and group.size > 1:
        return _exchange(x, group, dim, sizes, to_sizes, call)
    sizes = [x.shape[dim]] * group.size if sizes is None else check_sizes(sizes, group, x.shape[dim], "all_to_all")
    to_sizes = cut_sizes(x, group, to_dim, to_sizes, "all_to_all")
    begin(Move("all_to_all", Shard(dim), Shard(to_dim), dim, to_dim, length=sum(sizes)), group, x, call)
    return collectives.all_to_all(x, group, dim, sizes, to_dim, to_sizes)


def _exchange(
    x: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None, to_sizes: Sequence[int] | None, call: str
) -> Tensor:
    """Both dims are one: parts sent and received lie one after the other; ``sizes`` are those that come."""
    to_sizes = exchanges(x, group, dim, to_sizes, call)
    sizes = list(to_sizes if sizes is None else sizes)
    rest = math.prod(n for d, n in enumerate(x.shape) if d != dim)
    flat, arrive, leave, shape = collectives.exchange_of(x, group, dim, sizes, dim, to_sizes)
    return collectives.arrived(
        collectives.exchanged(flat, arrive, leave, group, rest > 0).wait(), shape, group, dim, sizes
    )


def exchanges(x: Tensor, group: Ranks, dim: int, leave: Sequence[int] | None, call: str) -> list[int]:
    """Check an exchange of stretches of one dim and tell of it, with the bytes that leave this rank; the lengths that leave."""
    leave = cut_sizes(x, group, dim, leave, "all_to_all")
    away = sum(leave) - leave[group.index] if group.is_member() else 0
    count = x.nbytes // max(x.shape[dim], 1) * away
    begin(Move("all_to_all", Shard(dim), Shard(dim), dim, dim), group, x, call, count=count)
    return leave


def broadcast(x: Tensor, group: Ranks, src: int, call: str = "broadcast") -> Tensor:
    """Fill ``x`` in place with the tensor of the rank at place ``src`` of the group."""
    begin(_BROADCAST, group, x, call, sends=group.index == src)
    if x.is_contiguous():
        return collectives.broadcast(x, group, src)
    return x.copy_(collectives.broadcast(x.contiguous(), group, src))


def barrier(group: Ranks) -> None:
    """Wait until every rank of the group is here."""
    member(group, "barrier")
    collectives.barrier(group)


def cut_sizes(x: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None, call: str) -> list[int]:
    """The lengths into which ``dim`` is cut: those given, or equal ones."""
    if sizes is not None:
        if len(sizes) != group.size or sum(sizes) != x.shape[dim]:
            raise CommunicationError(
                f"{call}: sizes {list(sizes)} do not cut dim {dim} of {list(x.shape)} into {group.size} parts of it"
            )
        return list(sizes)
    if x.shape[dim] % group.size:
        raise CommunicationError(
            f"{call}: dim {dim} of {list(x.shape)} does not divide into {group.size} equal parts; say the length of "
            f"each: sizes={[len(part) for part in torch.arange(x.shape[dim], device='cpu').tensor_split(group.size)]}"
        )
    return [x.shape[dim] // group.size] * group.size


def check_sizes(sizes: Sequence[int], group: Ranks, mine: int, call: str) -> list[int]:
    """Lengths on each rank, of which this one's must be what it holds."""
    if len(sizes) != group.size or sizes[group.index] != mine:
        raise CommunicationError(
            f"{call}: sizes {list(sizes)} must have one length for each of {group.size} ranks, and {mine} for this one, "
            f"the rank at place {group.index}"
        )
    return list(sizes)


def dim_of(x: Tensor, dim: int, call: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise CommunicationError(f"{call}: there is no dim {dim} in a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def member(group: Ranks, call: str) -> None:
    if group.index < 0:
        raise CommunicationError(
            f"{call} among ranks {list(group.ranks)} was called by a rank outside of them: call it only if "
            "group.is_member()"
        )


def begin(move: Move, group: Ranks, x: Tensor, call: str, sends: bool = True, count: int | None = None) -> None:
    """Say what comes, to who watches and to the other ranks. ``sends``: whether this rank does; ``count``: how many bytes."""
    member(group, call)
    if group.size > 1:
        record.serving.here = (call, "", ())
        if record.observers.here:
            tell(move, group, x, call, sends=sends, count=count)


def tell(
    move: Move,
    group: Ranks,
    x: Tensor,
    call: str,
    peer: str = "x",
    sends: bool = True,
    count: int | None = None,
) -> None:
    """Show a message to every observer."""
    kind, source, target, dim, to_dim, op, length = move
    before, after = (Layout.of(group.mesh(), x.dim(), [placement]) for placement in (source, target))
    if count is None:
        count = sent(kind, x.nbytes, group.size) if sends else 0
    step = Step(kind, 0, before, after, dim, to_dim, op, count, machine.here.message(count))
    shape = list(x.shape)
    if dim >= 0 and (length >= 0 or dim == to_dim):
        shape[dim] = length
    line = record.user_line()
    record.tell(record.Notice(step, call, peer, tuple(shape), "the program asks for it", line, explicit=True))
