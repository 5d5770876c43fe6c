"""Messages that are started now and awaited later: collectives, and sends and receives with tags.

A handle's ``wait`` gives the result, or an error that names the rank that does not come. Where a message cannot be left
under way (a graph is traced, or the group's size is one) it is complete when it has been started.
"""

from __future__ import annotations

import atexit
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.issue import collectives, forms, plain, trace
from onecard.comm.issue.by_gpu import way
from onecard.comm.issue.groups import back_of
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.message import recording
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.shm.group import ShmGroup
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.recorded import one_node

LAST = 30.0  # seconds at the end of a process, for sends that nobody has received yet
KEPT = 1024  # sends that nobody waits for, before the oldest is waited for
BACK = 1 << 30  # in the tag of what comes back for a message: its gradient


def all_reduce(
    x: Tensor, group: Ranks, op: str = "sum", inplace: bool = False, call: str = "all_reduce", later: bool = True
) -> Handle:
    """``plain.all_reduce``, left under way. ``inplace``: ``x`` may be overwritten, and is not read before the handle is awaited.

    ``later``: whether to leave it under way; what cannot be runs at once.
    """
    plain.begin(plain.reduces(op), group, x, call)
    return collectives.reduced(x, group, op, inplace, later)


def all_gather(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    call: str = "all_gather",
    later: bool = True,
) -> Handle:
    """``plain.all_gather``, left under way."""
    dim, sizes = plain.gathers(x, group, dim, sizes, call)
    return collectives.gathered(x, group, dim, sizes, later=later)


def reduce_scatter(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    call: str = "reduce_scatter",
    later: bool = True,
) -> Handle:
    """A reduce-scatter that sums, left under way. Where the parts travel (see collectives.py), ``wait`` adds them."""
    dim, sizes = plain.scatters(x, group, dim, sizes, "sum", call)
    return collectives.scattered(x, group, dim, sizes, later=later)


def all_to_all(
    x: Tensor, group: Ranks, come: Sequence[int], leave: Sequence[int], call: str = "all_to_all", later: bool = True
) -> Handle:
    """Rows of ``x`` to each rank (``leave``) and rows from each (``come``), left under way."""
    leave = plain.exchanges(x, group, 0, leave, call)
    flat, arrive, sent, shape = collectives.exchange_of(x, group, 0, come, 0, leave)
    way = collectives.exchanged(flat, arrive, sent, group, math.prod(x.shape[1:]) > 0, later)
    return way.then(lambda flat: collectives.arrived(flat, shape, group, 0, come))


def tag_of(name: str, microbatch: int = 0) -> int:
    """A tag for the messages of one kind and one microbatch, the same on all ranks.

    Example:
        >>> tag_of("forward", 3) == tag_of("forward", 3), tag_of("forward", 3) == tag_of("forward", 4)
        (True, False)
    """
    return zlib.crc32(f"{name} {microbatch}".encode()) & (BACK - 1)


_sends: Kept[list[Handle]] = Kept(list)


def isend(
    x: Tensor, dst: int, tag: int = 0, group: Ranks | None = None, call: str = "send", ways: bool = False
) -> Handle:
    """Start sending ``x`` to the rank at place ``dst`` of the group. Nobody has to wait: what is not awaited is kept.

    Args:
        x: may not be written to before the message has arrived, as with ``torch.distributed.isend``.
        tag: the receiver takes the message by it; messages of several microbatches have several tags (``tag_of``).
        ways: where there are no tags (NCCL), messages there and back do not wait for each other; then the receiver says so, too.
    """
    made, here = _message("send", x, dst, tag, group, call)
    if here is None:
        return Handle.complete(x)
    if recording():
        _send(x, dst, tag, here.ranks, here.name, call)
        return Handle.complete(x)
    dense = forms.dense(x)
    if dense.is_cpu and (device := way(here.process_group)) is not None:
        dense = dense.to(device)
    what = _named("send", tag, call)
    with _starting(what, made):
        work = _line(here, here.index > dst, ways).send([forms.moved(dense)], _place(here, dst), tag)
    handle = Handle(what, made, work, lambda: x, (x, dense))
    keep(handle)
    return handle


def irecv(
    x: Tensor, src: int, tag: int = 0, group: Ranks | None = None, call: str = "recv", ways: bool = False
) -> Handle:
    """Start filling ``x`` with what the rank at place ``src`` sends under the tag; read it after ``wait``."""
    made, here = _message("recv", x, src, tag, group, call)
    if here is None:
        return Handle.complete(x)
    if recording():  # a node that waits stands where the program does: before, it may have something to send
        return Handle("", "", None, lambda: (_receive(x, src, tag, here.ranks, here.name, call), x)[1])
    device = way(here.process_group) if x.is_cpu else None
    there = x if device is None else torch.empty_like(x, device=device)
    dense = there if there.is_contiguous() else torch.empty_like(there, memory_format=torch.contiguous_format)
    what = _named("recv", tag, call)
    with _starting(what, made):
        work = _line(here, src > here.index, ways).recv([forms.moved(dense)], _place(here, src), tag)
    return Handle(what, made, work, lambda: x if dense is x else x.copy_(dense), (x, dense))


def forget(group: Ranks, is_old: Callable[[int], bool]) -> None:
    """Give up what has come from other ranks, and nobody has taken, under tags that are old."""
    if group.size > 1 and isinstance(own := group.process_group, ShmGroup):
        own.forget(is_old)


def together(
    asked: Sequence[tuple[str, Tensor, int]], group: Ranks, tag: int = 0, call: str = "exchange"
) -> list[Handle]:
    """Start sends and receives that go on at the same time, whatever their order: on GPUs as one, for NCCL does one after the
    other, and two ranks that both send first would wait for each other.

    Args:
        asked: "send" or "recv", a contiguous tensor, the place of the other rank; one or several.
    """
    if recording() or not any(x.is_cuda for _, x, _ in asked) or group.process_group is None:
        begin = {"send": isend, "recv": irecv}
        return [begin[kind](x, place, tag, group, call) for kind, x, place in asked]
    words = [_message(kind, x, place, tag, group, call)[0] for kind, x, place in asked]
    begun: Any = {"send": dist.isend, "recv": dist.irecv}
    operations = [dist.P2POp(begun[k], forms.moved(x), group.ranks[p], group.process_group, tag) for k, x, p in asked]
    with _starting(call, ", ".join(words)):
        works = dist.batch_isend_irecv(operations)
    each = works if len(works) == len(asked) else works * len(asked)  # NCCL makes one work of them all
    made = []
    for (kind, x, _), peer, work in zip(asked, words, each, strict=True):
        made.append(Handle(_named(kind, tag, call), peer, work, partial(_itself, x), x))
        if kind == "send":
            keep(made[-1])
    return made


def _line(group: Ranks, back: bool, ways: bool) -> Any:
    """The process group that carries a message: its own; back, of two ways of which NCCL would make one queue, another one."""
    return back_of(group) if ways and back and way(group.process_group) is not None else group.process_group


def _itself(x: Tensor) -> Tensor:
    return x


def shift(x: Tensor, to: int, come: int, group: Ranks, tag: int, call: str) -> Handle:
    """Send ``x`` to one place of the group, and receive its like from another, as in a ring: what has come."""
    if recording() and x.is_cuda:  # one node: on replays, too, both are under way at once
        return Handle("", "", None, lambda: _shifted(x, to, come, tag, group.ranks, group.name, call))
    coming, _ = together([("recv", torch.empty_like(x), come), ("send", x.contiguous(), to)], group, tag, call)
    return coming


@one_node()
def _shifted(x: Tensor, to: int, come: int, tag: int, ranks: tuple[int, ...], name: str, call: str) -> Tensor:
    """A shift of a recording."""
    return shift(x, to, come, of_ranks(tuple(ranks), name), tag, call).wait()


def _named(kind: str, tag: int, call: str) -> str:
    return f"{kind} with tag {tag}" + (f" ({call})" if call != kind else "")


@contextmanager
def _starting(what: str, peer: str) -> Iterator[None]:
    """A backend may know already that the other rank has gone."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as fault:
        raise CommunicationError(f"{what} {peer} cannot start on rank {world.get_rank()}: {fault}") from fault


@one_node()
def _send(x: Tensor, dst: int, tag: int, ranks: tuple[int, ...], name: str, call: str) -> None:
    """A send of a recording: of a copy, because a replay may use the memory of ``x`` again before it has arrived."""
    isend(x.clone(), dst, tag, of_ranks(tuple(ranks), name), call)


@one_node(0)
def _receive(x: Tensor, src: int, tag: int, ranks: tuple[int, ...], name: str, call: str) -> None:
    irecv(x, src, tag, of_ranks(tuple(ranks), name), call).wait()


def finish_sends(timeout: float | None = None) -> None:
    """Wait for the sends that nobody has waited for."""
    while _sends.here:
        _sends.here.pop(0).wait(timeout)


def _at_exit() -> None:
    """What was sent arrives, also when this rank ends first; not where it ends by an error, which others must not wait for."""
    if not hasattr(sys, "last_value"):
        with suppress(CommunicationError):
            finish_sends(LAST)


def keep(handle: Handle) -> None:
    """Sends that are under way stay here, because a backend drops what nobody holds."""
    while _sends.here and _sends.here[0].done():
        _sends.here.pop(0)
    if not _sends.here:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # before the process group is ended, which was registered earlier
    if len(_sends.here) >= KEPT:
        _sends.here.pop(0).wait()
    _sends.here.append(handle)


def _message(kind: str, x: Tensor, peer: int, tag: int, group: Ranks | None, call: str) -> tuple[str, Ranks | None]:
    """Check a send or a receive and show it to who watches; the words for errors, and no group where nothing is sent."""
    here = of_ranks() if group is None else group
    plain.member(here, call)
    if not 0 <= peer < here.size or peer == here.index:
        raise CommunicationError(
            f"{call}: place {peer} of ranks {list(here.ranks)} is "
            + ("this rank itself" if peer == here.index else "not there")
            + "; a message goes to another rank of the group"
        )
    if not 0 <= tag < 1 << 31:
        raise CommunicationError(
            f"{call}: tag {tag} is not in [0, 2**31): comm.started.tag_of(name, microbatch) makes one"
        )
    if trace.tracing():
        raise trace.refuse(f"{call} with a tag")
    words = f"{'to' if kind == 'send' else 'from'} rank {here.ranks[peer]}"
    if record.observers.here and kind == "send":
        plain.tell(plain.SEND, here, x, call, words)
    # Without data nothing is sent; who writes the step down is told, because it takes its time.
    return words, None if x.is_meta or (trace.faking() and not recording()) else here


def _place(group: Ranks, place: int) -> int:
    """The rank in the process group of the one at a place."""
    return group.order.index(place) if group.order else place
