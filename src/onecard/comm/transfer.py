"""Run a transfer between meshes on this rank: post its sends and receives, copy what it has itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm import check, world
from onecard.errors import CommunicationError
from onecard.transfer import Box, Piece, Transfer, box_of


def run_transfer(transfer: Transfer, local: Tensor) -> Tensor:
    """This rank's part under the target layout.

    Args:
        transfer: from ``transfer.plan_transfer``.
        local: this rank's part under the source layout (empty on a rank outside the source's mesh).

    Returns:
        A new tensor; an empty one on a rank outside the target's mesh.
    """
    me = world.get_rank()
    world.init()
    ranks = {*transfer.source.mesh, *transfer.target.mesh}
    if check.on and me in ranks:
        call = f"reshard of {list(transfer.shape)} from [{transfer.source}] to [{transfer.target}]"
        check.agreed(call, ranks, "Every rank of both meshes makes this call, at the same place of the program.")
    result = _blank(transfer, local, me)
    mine = box_of(transfer.source, transfer.shape, me) if me in transfer.source.mesh else None
    theirs = box_of(transfer.target, transfer.shape, me) if me in transfer.target.mesh else None
    outgoing, incoming = [], []
    for piece in transfer.pieces:
        if piece.sender == me == piece.receiver:
            _view(result, theirs, piece.box).copy_(_view(local, mine, piece.box))
        elif piece.sender == me:
            outgoing.append((piece, _view(local, mine, piece.box).contiguous()))
        elif piece.receiver == me:
            part = _view(result, theirs, piece.box)
            incoming.append((piece, part, part if part.is_contiguous() else torch.empty_like(part).contiguous()))
    _exchange(outgoing, [(piece, buffer) for piece, _, buffer in incoming])
    for _, part, buffer in incoming:
        if buffer is not part:
            part.copy_(buffer)
    return result


def _blank(transfer: Transfer, local: Tensor, me: int) -> Tensor:
    """The part before anything arrives: under a pending product ones, else zeros."""
    if me not in transfer.target.mesh:
        return local.new_empty(0)
    fill = 1 if any(op == "product" for _, op in transfer.target.pending) else 0
    return local.new_full(transfer.target.local_shape(transfer.shape), fill)


def _view(part: Tensor, held: Box | None, box: Box) -> Tensor:
    """A box of the whole tensor inside the part that holds it."""
    starts = [start for start, _ in held or ()]
    return part[tuple(slice(a - s, b - s) for (a, b), s in zip(box, starts, strict=True))]


def _exchange(outgoing: list[tuple[Piece, Tensor]], incoming: list[tuple[Piece, Tensor]]) -> None:
    if not outgoing and not incoming:
        return
    group: Any = dist.group.WORLD
    peers = tuple(sorted({p.sender for p, _ in incoming} | {p.receiver for p, _ in outgoing} | {world.get_rank()}))
    sent = sum(t.nbytes for _, t in outgoing)
    try:
        operations = [dist.P2POp(dist.isend, t, p.receiver, group) for p, t in outgoing]
        operations += [dist.P2POp(dist.irecv, t, p.sender, group) for p, t in incoming]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    except RuntimeError as fault:
        raise CommunicationError(
            f"transfer of {sent} bytes between meshes failed on rank {world.get_rank()} (with ranks {list(peers)}): {fault}. "
            "Every rank must run the same program, those outside both meshes included."
        ) from fault
