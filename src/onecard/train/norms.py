"""Norms of gradients of which each rank has parts: each element of the whole is counted on one rank, and all know the norm.

Of one mesh torch's own operators do it, by their rules. What lies on several (a pipeline by marks), and plain parts (the manual
level), is counted here: one message of one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from onecard import recorded
from onecard._torch import names, patches
from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives, trace
from onecard.comm.issue.groups import Group
from onecard.comm.issue.ranks import of_ranks
from onecard.errors import LayoutError
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.tensor import DistTensor
from onecard.tensor.buckets import reduce_all
from onecard.tensor.dist_tensor import announce
from onecard.tensor.spec import Spec
from onecard.train.shard import Shard


def counted(shard: Shard, grad: Tensor, lines: Iterable[Group] = ()) -> Iterator[Tensor]:
    """What this rank counts of a gradient that is summed.

    Args:
        shard: what its parameter is a part of.
        lines: groups whose ranks hold copies of it, but where it is cut among them.
    """
    cut = {*shard.group.ranks} if shard.group is not None else set()
    if isinstance(grad, DistTensor):
        layout, place = grad._spec.layout, grad.mesh.coordinate()
        if place is None or any(n for n, p in zip(place, layout.placements, strict=True) if isinstance(p, Replicate)):
            return
        if not layout.is_replicated:
            cut |= {*grad.mesh.process_ids}
        shard, grad = Shard(shard.shape, sums=shard.sums), grad._local
    if any(line.index and not {*line.ranks} <= cut for line in lines) or any(group.index for group in shard.sums):
        return
    if grad.is_sparse:
        grad = grad.coalesce().values() if shard.dim < 0 else grad.to_dense()
    if shard.dim < 0 or not shard.runs:
        yield grad
        return
    for start, length in shard.owned():
        yield grad.narrow(shard.dim, start, length)


def joined(
    parts: Sequence[Sequence[Tensor]],
    norm_type: float,
    device: torch.device,
    call: str,
    explicit: bool,
    same: bool = False,
) -> Tensor:
    """The norm of what all ranks of the world count, in float64 on each of them. Every rank calls it.

    Each rank's goes apart, and over the largest: the sum of their powers would be infinite before the norm is.

    Args:
        parts: what this rank counts of each gradient; same: whether all ranks have the same gradients, in the same order.
    """
    pending = ((0, "max" if norm_type == inf else f"norm{norm_type}"),)
    if same and recorded.watcher is not None:  # each gradient is compared by itself: one part on each rank
        each = [_one_of(pieces, device) for pieces in parts]
    else:
        each = [piece for pieces in parts for piece in pieces if piece.numel()]
    mine = _local(each or [_one_of((), device)], norm_type, pending if same else ())
    _say(mine, pending)
    source = recorded.source_of(mine)
    norms = _of_all_ranks(mine.reshape(1), call, explicit)
    recorded.alike(norms, of_ranks(name="world").ranks)
    largest = norms.max()
    total = torch.linalg.vector_norm(norms / largest.clamp(1e-300, 1e300), norm_type) * largest
    _say(total, (), source)
    return total


def _one_of(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """What a rank counts of a gradient, as one tensor that is not empty."""
    pieces = [piece for piece in pieces if piece.numel()]
    if not pieces:
        return torch.zeros(1, device=device, dtype=torch.float64)
    return pieces[0] if len(pieces) == 1 else torch.cat([x.reshape(-1) for x in pieces])


def _say(x: Tensor, pending: tuple[tuple[int, str], ...], source: Any = None) -> None:
    """How a number of all ranks lies, for who looks on."""
    if recorded.watcher is not None:
        layout = Layout.make(of_ranks(name="world").mesh(), ((),) * x.dim(), pending)
        recorded.laid(x, Spec.make(layout, x.shape, (), x.dtype, x.device), source)


def _of_all_ranks(mine: Tensor, call: str, explicit: bool) -> Tensor:
    world = of_ranks(name="world")
    record.serving.here = (call, "", (world.size,))
    if record.observers.here:
        parts, whole = (Layout.make(world.mesh(), (axes,)) for axes in ((0,), ()))
        steps = resharding.plan((world.size,), mine.element_size(), parts, whole, machine.here)
        announce(steps, call, "x", (world.size,), "the norms of all ranks, to be joined", explicit)
    return collectives.all_gather(mine, world, 0, [1] * world.size)


def _local(parts: Sequence[Tensor], norm_type: float, pending: tuple[tuple[int, str], ...]) -> Tensor:
    norms: list[Tensor] = names.foreach_norm([*parts], norm_type)
    listed = torch.stack([x.to(norms[0].device) for x in norms])
    for known in (*norms, listed) if pending else ():
        _say(known, pending)
    norm = torch.linalg.vector_norm(listed, norm_type).to(torch.float64)
    # In their own dtype, which is 20 times as fast; its squares may be infinite where its norm is not.
    if norm.device.type == "cpu" and recorded.recorder is None and not trace.faking() and not norm.isfinite():
        each = [
            torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float64)) for g in parts
        ]
        return torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm


def install() -> None:
    """``get_total_norm``, and so ``clip_grad_norm_``, of a pipeline by marks is one card's."""
    patches.within("torch.nn.utils.get_total_norm", torch.nn.utils.get_total_norm, _over_meshes)


patches.with_first_tensor(install)


def _over_meshes(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len({x.mesh if isinstance(x, DistTensor) else None for x in listed}) > 1:
            listed = [_of_stages(listed, norm_type)]
        return torchs(listed, norm_type, error_if_nonfinite, foreach)

    return get_total_norm


def _of_stages(tensors: list[Tensor], norm_type: float) -> Tensor:
    """No rank has all of them, and every rank needs the norm. Plain ones are the same on all ranks."""
    if norm_type <= 0:
        raise LayoutError(
            f"get_total_norm of tensors on several meshes: norm_type is {norm_type}; want a positive number, or inf"
        )
    reduce_all(tensors, "get_total_norm", explicit=False)  # all alike, whatever kernels come after
    world = (of_ranks(name="world"),)
    parts = [[*counted(Shard(tuple(x.shape)), x, () if isinstance(x, DistTensor) else world)] for x in tensors]
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors)).to_real()
    return joined(parts, norm_type, tensors[0].device, "get_total_norm", explicit=False).to(dtype)
