"""Run a transfer between meshes on this rank: post its sends and receives, copy what it has itself, pass on the rest."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm.agree import check
from onecard.comm.base import flight
from onecard.comm.base.state import Kept
from onecard.comm.issue import started, trace
from onecard.comm.issue.by_gpu import way
from onecard.comm.world import gone, world
from onecard.errors import CommunicationError
from onecard.moves.transfer import Transfer, box_of
from onecard.place.boxes import view
from onecard.recorded import one_node

Peers = list[tuple[int, Tensor]]  # the rank at the other end, and what is sent or filled

_EVERY_RANK = (
    "Every rank of both meshes makes this call, at the same place of the program: take it out of any branch on the rank"
)


@one_node()
def run_transfer(transfer: Transfer, local: Tensor, answered: bool = False, microbatch: int | None = None) -> Tensor:
    """This rank's part under the target layout.

    Args:
        transfer: from ``transfer.plan_transfer``.
        local: this rank's part under the source layout (empty on a rank outside the source's mesh).
        answered: a rank that sends waits until its receivers have taken it. Otherwise it goes on at once, as the stages
            of a pipeline do, as long as a message fits the buffers on its way.
        microbatch: whose message this is, of a pipeline (``sends_under_way``): it goes on at once also where a message does not
            fit, and no message is taken for that of another microbatch.

    Returns:
        A new tensor; an empty one on a rank outside the target's mesh.

    Raises:
        CommunicationError: a rank does not come within ``ONECARD_TIMEOUT``; names it.
    """
    me = world.get_rank()
    result = _blank(transfer, local, me)
    if local.is_meta or me not in transfer.ranks:
        return result
    if trace.tracing():
        raise trace.refuse("a reshard to another mesh")
    world.init()
    if check.on:
        call = f"reshard of {list(transfer.shape)} from [{transfer.source}] to [{transfer.target}]"
        check.agreed(call, transfer.ranks, f"{_EVERY_RANK}.")
    board = flight.board.here
    if board is not None:
        board.enter("transfer", transfer.ranks, transfer.sent_by(me))
    try:
        _run(transfer, local, result, me, microbatch)
        if answered:
            _answer(transfer, local, me)
    finally:
        if board is not None:
            board.leave()
    return result


def _run(transfer: Transfer, local: Tensor, result: Tensor, me: int, microbatch: int | None) -> None:
    mine = box_of(transfer.source, transfer.shape, me) if me in transfer.source.mesh else ()
    theirs = box_of(transfer.target, transfer.shape, me) if me in transfer.target.mesh else ()
    for piece in transfer.pieces:
        if piece.sender == me == piece.receiver:
            view(result, theirs, piece.box).copy_(view(local, mine, piece.box))
    for hop, (part, held) in enumerate(((local, mine), (result, theirs))):
        sent: dict[int, list[Tensor]] = {}
        received: dict[int, list[Tensor]] = {}
        for piece in transfer.pieces:
            if piece.hop != hop or piece.sender == piece.receiver:
                continue
            if piece.sender == me:
                sent.setdefault(piece.receiver, []).append(view(part, held, piece.box))
            elif piece.receiver == me:
                received.setdefault(piece.sender, []).append(view(result, theirs, piece.box))
        buffers = [(peer, _buffer(places)) for peer, places in received.items()]
        _exchange(transfer, [(peer, _packed(boxes)) for peer, boxes in sent.items()], buffers, microbatch)
        for peer, buffer in buffers:
            _unpack(buffer, received[peer])


def _packed(boxes: list[Tensor]) -> Tensor:
    """What one rank sends to another, as one message."""
    return boxes[0].contiguous() if len(boxes) == 1 else torch.cat([box.reshape(-1) for box in boxes])


def _buffer(places: list[Tensor]) -> Tensor:
    """Where such a message is received: at once where it belongs, if that is one piece of memory."""
    if len(places) == 1:
        return places[0] if places[0].is_contiguous() else places[0].new_empty(places[0].shape)
    return places[0].new_empty(sum(place.numel() for place in places))


def _unpack(buffer: Tensor, places: list[Tensor]) -> None:
    if buffer is not places[0]:
        parts = buffer.reshape(-1).split([place.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part.view(place.shape))


def _answer(transfer: Transfer, local: Tensor, me: int) -> None:
    """One byte from each receiver to each rank that it had something from."""
    pairs = dict.fromkeys((p.sender, p.receiver) for p in transfer.pieces if p.sender != p.receiver)
    thanks = [(sender, local.new_zeros(1, dtype=torch.uint8)) for sender, receiver in pairs if receiver == me]
    _exchange(transfer, thanks, [(r, local.new_empty(1, dtype=torch.uint8)) for s, r in pairs if s == me])


def _blank(transfer: Transfer, local: Tensor, me: int) -> Tensor:
    """The part before anything arrives: under a pending product ones, else zeros."""
    if me not in transfer.target.mesh:
        return local.new_empty(0)
    fill = 1 if any(op == "product" for _, op in transfer.target.pending) else 0
    return local.new_full(transfer.target.local_shape(transfer.shape), fill)


def _exchange(transfer: Transfer, outgoing: Peers, incoming: Peers, microbatch: int | None = None) -> None:
    """Send and receive tensors, each with the rank at the other end."""
    if not outgoing and not incoming:
        return
    group: Any = dist.group.WORLD
    tag = _tag(transfer, microbatch)
    if microbatch is not None and not any(t.is_cuda for _, t in outgoing):  # on a GPU nobody waits but the stream
        for peer, t in outgoing:
            _leave_under_way(t.clone(), peer, group, tag)
        outgoing = []
    outgoing, incoming, kept = (
        [(peer, _carried(t)) for peer, t in outgoing],
        [(p, _carried(t)) for p, t in incoming],
        incoming,
    )
    operations = [dist.P2POp(dist.isend, t, peer, group, tag) for peer, t in outgoing]
    operations += [dist.P2POp(dist.irecv, t, peer, group, tag) for peer, t in incoming]
    peers = awaited = [operation.peer for operation in operations]
    try:
        works = dist.batch_isend_irecv(operations) if operations else []
        for at, work in enumerate(works):
            awaited = peers[at : at + 1] if len(works) == len(peers) else peers  # NCCL makes one work of them all
            work.wait()
        for (_, place), (_, t) in zip(kept, incoming, strict=True):
            if place is not t:
                place.copy_(t)
    except RuntimeError as fault:
        raise CommunicationError(
            f"reshard of {list(transfer.shape)} from [{transfer.source}] on {transfer.source.mesh!r} to "
            f"[{transfer.target}] on {transfer.target.mesh!r}: rank {world.get_rank()} waited for rank(s) "
            f"{sorted(set(awaited))}. {fault}.{gone.words(transfer.ranks)} "
            f"{_EVERY_RANK}; for full_tensor() these are all ranks of the world."
        ) from fault


def _carried(x: Tensor) -> Tensor:
    """A tensor where NCCL takes it."""
    device = way(dist.group.WORLD) if x.is_cpu else None
    return x if device is None else x.to(device, copy=True)


under_way: Kept[list[int]] = Kept(list)


@contextmanager
def sends_under_way(microbatch: int) -> Iterator[None]:
    """Inside, transfers are of this microbatch of a pipeline: a rank that sends goes on before its message has been taken, so
    that stages that send each other at once do not wait in a circle, and ranks may take microbatches in different orders.
    What is sent is copied, so that the program may write to it. Replays of what is recorded here do so, too."""
    under_way.here.append(microbatch)
    try:
        yield
    finally:
        under_way.here.pop()


def microbatch_under_way() -> int | None:
    """The microbatch whose messages these are (``sends_under_way``); None outside of pipelines."""
    return under_way.here[-1] if under_way.here else None


def _leave_under_way(t: Tensor, peer: int, group: Any, tag: int) -> None:
    try:
        work = dist.isend(t, peer, group, tag)
    except RuntimeError as fault:
        raise CommunicationError(f"rank {world.get_rank()} cannot send to rank {peer}: {fault}") from fault
    started.keep(started.Handle("send of a reshard", f"to rank {peer}", work, lambda: t, t))


def _tag(transfer: Transfer, microbatch: int | None) -> int:
    """A number for this kind of transfer: what nobody took of one must not be taken for another's."""
    words = f"{transfer.shape} {transfer.itemsize} {transfer.source.mesh!r} {transfer.source} "
    whose = "" if microbatch is None else f" of microbatch {microbatch}"
    return zlib.crc32(f"{words}{transfer.target.mesh!r} {transfer.target}{whose}".encode()) & 0x7FFFFFFF
