"""Collectives on plain tensors, as a program asks for them: each is shown to who watches, and then runs.

A rank outside the group may not call them. ``call`` names what the message is for: the layer, or the collective itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from onecard.comm import collectives, record
from onecard.comm.ranks import Ranks
from onecard.comm.state import machine
from onecard.errors import CommunicationError
from onecard.layout import Layout
from onecard.resharding import Step

_R = Replicate()
# What part of its tensor (all_gather: of the result) a rank of n sends.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "scatter": lambda n: (n - 1) / n,
}


def all_reduce(x: Tensor, group: Ranks, op: str = "sum", inplace: bool = False, call: str = "all_reduce") -> Tensor:
    """The reduction of all ranks' tensors, on every rank. ``op`` as in ``Partial``."""
    _begin("all_reduce", group, x, call, Partial(op), _R, op=op)
    return collectives.all_reduce(x, group, op, inplace)


def all_gather(
    x: Tensor, group: Ranks, dim: int = 0, sizes: Sequence[int] | None = None, call: str = "all_gather"
) -> Tensor:
    """The ranks' tensors joined along ``dim``; ``sizes`` are their lengths along it, all equal if left out."""
    dim = _dim(x, dim, "all_gather")
    sizes = [x.shape[dim]] * group.size if sizes is None else check_sizes(sizes, group, x.shape[dim], "all_gather")
    _begin("all_gather", group, x, call, Shard(dim), _R, dim, whole=sum(sizes))
    return collectives.all_gather(x, group, dim, sizes)


def reduce_scatter(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    call: str = "reduce_scatter",
) -> Tensor:
    """This rank's part along ``dim`` of the reduction of all ranks' tensors."""
    dim = _dim(x, dim, "reduce_scatter")
    sizes = cut_sizes(x, group, dim, sizes, "reduce_scatter")
    _begin("reduce_scatter", group, x, call, Partial(op), Shard(dim), dim, op=op)
    return collectives.reduce_scatter(x, group, dim, sizes, op)


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
    dim, to_dim = _dim(x, dim, "all_to_all"), _dim(x, to_dim, "all_to_all")
    if dim == to_dim and group.size > 1:
        joined = _exchange(x, group, dim, sizes, to_sizes, call)
        return joined
    sizes = [x.shape[dim]] * group.size if sizes is None else check_sizes(sizes, group, x.shape[dim], "all_to_all")
    to_sizes = cut_sizes(x, group, to_dim, to_sizes, "all_to_all")
    _begin("all_to_all", group, x, call, Shard(dim), Shard(to_dim), dim, to_dim, whole=sum(sizes))
    return collectives.all_to_all(x, group, dim, sizes, to_dim, to_sizes)


def _exchange(
    x: Tensor, group: Ranks, dim: int, sizes: Sequence[int] | None, to_sizes: Sequence[int] | None, call: str
) -> Tensor:
    """Both dims are one: parts sent and received lie one after the other; ``sizes`` are those that come."""
    to_sizes = cut_sizes(x, group, dim, to_sizes, "all_to_all")
    sizes = list(to_sizes if sizes is None else sizes)
    _begin("all_to_all", group, x, call, Shard(dim), Shard(dim), dim, dim, whole=-1)
    rest = x.numel() // x.shape[dim] if x.shape[dim] else 1
    flat, arrive, leave, shape = collectives.exchange_of(x, group, dim, sizes, dim, to_sizes)
    return collectives.arrived(collectives._exchange(flat, arrive, leave, group, rest > 0), shape, group, dim, sizes)


def broadcast(x: Tensor, group: Ranks, src: int, call: str = "broadcast") -> Tensor:
    """Fill ``x`` in place with the tensor of the rank at place ``src`` of the group."""
    _begin("broadcast", group, x, call, _R, _R, sent=x.nbytes if group.index == src else 0)
    if x.is_contiguous():
        return collectives.broadcast(x, group, src)
    return x.copy_(collectives.broadcast(x.contiguous(), group, src))


def barrier(group: Ranks) -> None:
    """Wait until every rank of the group is here."""
    _member(group, "barrier")
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
            f"each: sizes={[len(part) for part in torch.arange(x.shape[dim]).tensor_split(group.size)]}"
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


def _dim(x: Tensor, dim: int, call: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise CommunicationError(f"{call}: there is no dim {dim} in a tensor of shape {list(x.shape)}")
    return dim % x.dim()


def _member(group: Ranks, call: str) -> None:
    if group.index < 0:
        raise CommunicationError(
            f"{call} among ranks {list(group.ranks)} was called by a rank outside of them: call it only if "
            "group.is_member()"
        )


def _begin(
    kind: str,
    group: Ranks,
    x: Tensor,
    call: str,
    source: Placement,
    target: Placement,
    dim: int = -1,
    to_dim: int = -1,
    op: str = "",
    sent: int = -1,
    whole: int | None = None,
) -> None:
    """Say what comes, to who watches and to the other ranks. ``whole``: the length along ``dim`` of all parts together."""
    _member(group, call)
    if group.size > 1:
        record.serving.here = (call, "", ())
        if record.observers.here:
            tell(kind, group, x, call, source, target, dim, to_dim, op, sent, whole=whole)


def tell(
    kind: str,
    group: Ranks,
    x: Tensor,
    call: str,
    source: Placement,
    target: Placement,
    dim: int = -1,
    to_dim: int = -1,
    op: str = "",
    sent: int = -1,
    peer: str = "",
    whole: int | None = None,
) -> None:
    """Show a message to every observer; ``sent``: its bytes, where they do not follow from its kind."""
    mesh = group.mesh()
    if sent < 0:
        sent = int(_SENT[kind](group.size) * x.nbytes)
    before, after = (Layout.of(mesh, x.dim(), [placement]) for placement in (source, target))
    step = Step(kind, 0, before, after, dim, to_dim, op, sent, machine.here.message(sent))
    shape = list(x.shape)
    if whole is not None:
        shape[dim] = whole
    record.tell(
        record.Message(
            step, call, peer or "x", tuple(shape), "the program asks for it", record.user_line(), explicit=True
        )
    )
