"""Messages that are started now and awaited later: collectives, and sends and receives with tags.

A handle's ``wait`` gives the result, or an error that names the rank that does not come. Where a message cannot be left
under way (a graph is traced, or the group's size is one) it is complete when it has been started.
"""

from __future__ import annotations

import atexit
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard import recorded
from onecard._torch import AllgatherOptions
from onecard.comm import check, collectives, flight, forms, gone, plain, record, trace, world
from onecard.comm.groups import Group
from onecard.comm.ranks import Ranks, of_ranks
from onecard.comm.state import Kept
from onecard.errors import CommunicationError
from onecard.recorded import one_node
from onecard.reductions import averaged

_R = Replicate()
LAST = 30.0  # seconds at the end of a process, for sends that nobody has received yet
KEPT = 1024  # sends that nobody waits for, before the oldest is waited for
BACK = 1 << 30  # in the tag of what comes back for a message: its gradient


class Started:
    """A message under way.

    Example:
        >>> Started.complete(torch.ones(2)).wait()
        tensor([1., 1.])
    """

    __slots__ = ("_finish", "_held", "_peer", "_result", "_what", "_work")

    def __init__(self, what: str, peer: str, work: Any, finish: Callable[[], Tensor], held: Any = None) -> None:
        self._what, self._peer, self._work, self._finish, self._held = what, peer, work, finish, held
        self._result: Tensor | None = None

    @classmethod
    def complete(cls, result: Tensor) -> Started:
        """One that has ended."""
        return cls("", "", None, lambda: result)

    @property
    def under_way(self) -> bool:
        """Whether something is still to be awaited; what could not be left under way was complete at once."""
        return self._work is not None

    def then(self, act: Callable[[Tensor], Tensor]) -> Started:
        """The same message with what ``act`` makes of its result, when it is awaited."""
        if self._work is None:
            return Started.complete(act(self.wait()))
        return Started(self._what, self._peer, self._work, lambda: act(self._finish()), self)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result. A second call gives it again.

        Args:
            timeout: seconds; that of the process group (``ONECARD_TIMEOUT``) if left out.

        Raises:
            CommunicationError: it did not end in time, or cannot any more; names the rank.
        """
        if self._work is not None:
            self._await(timeout)
            self._work = self._held = None
        if self._result is None:
            self._result = self._finish()
        return self._result

    def _await(self, timeout: float | None) -> None:
        board = flight.board.here
        watched = board is not None and not board.inside
        if board is not None and watched:
            board.enter(f"wait for {self._what}", (world.get_rank(),), 0)
        begin = time.monotonic()
        try:
            ended = self._work.wait(timedelta(seconds=timeout)) if timeout else self._work.wait()
        except (CommunicationError, RuntimeError) as fault:
            raise self._failed(fault, begin) from fault
        finally:
            if board is not None and watched:
                board.leave()
        if ended is False:
            raise self._failed(RuntimeError("it did not end"), begin)

    def _failed(self, fault: Exception, begin: float) -> CommunicationError:
        return CommunicationError(
            f"rank {world.get_rank()} waited {time.monotonic() - begin:.1f} s for {self._what} {self._peer}: {fault}"
            f"{'' if isinstance(fault, CommunicationError) else gone.words(range(world.get_world_size()))}"
        )


def all_reduce(
    x: Tensor, group: Ranks, op: str = "sum", inplace: bool = False, call: str = "all_reduce", later: bool = True
) -> Started:
    """Start ``plain.all_reduce``. ``inplace``: ``x`` may be overwritten, and is not read before the handle is awaited.

    ``later``: whether to leave it under way; what cannot be runs at once.
    """
    if not later or not _simple(x, op) or not can_wait(x, group):
        return Started.complete(plain.all_reduce(x, group, op, inplace, call))
    plain._begin("all_reduce", group, x, call, Partial(op), _R, op=op)
    return reduced(x, group, op, inplace)


def reduced(x: Tensor, group: Group, op: str = "sum", inplace: bool = False) -> Started:
    """Start ``collectives.all_reduce``; nobody who watches is told."""
    if not _simple(x, op) or not can_wait(x, group):
        return Started.complete(collectives.all_reduce(x, group, op, inplace))
    result = x if inplace else x.clone()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    work = _begun("all_reduce", group, result, lambda pg: pg.allreduce([result], options), op)

    def finish() -> Tensor:
        return averaged(result, group.size) if op == "avg" else result

    return Started("all_reduce", _among(group), work, finish, result)


def _simple(x: Tensor, op: str) -> bool:
    known = x.dtype in forms.NATIVE and x.dtype is not torch.bool
    return known and op in ("sum", "avg") and x.is_contiguous() and x.numel() > 0


def all_gather(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    call: str = "all_gather",
    later: bool = True,
) -> Started:
    """Start ``plain.all_gather``."""
    even = sizes is None or len(set(sizes)) == 1
    if not later or not even or group.order or not x.numel() or not can_wait(x, group):
        return Started.complete(plain.all_gather(x, group, dim, sizes, call))
    dim = plain._dim(x, dim, "all_gather")
    send = forms.dense(x.movedim(dim, 0))
    plain._begin("all_gather", group, x, call, Shard(dim), _R, dim, whole=group.size * x.shape[dim])
    joining = gathered(send, send.new_empty((group.size * send.shape[0], *send.shape[1:])), group)
    return joining.then(lambda whole: whole.movedim(0, dim))


def gathered(x: Tensor, into: Tensor, group: Group) -> Started:
    """Start filling ``into`` with the ranks' contiguous tensors, equal in size, one after the other.

    ``x`` may be this rank's part of ``into``; nobody who watches is told.
    """
    options = AllgatherOptions()
    work = _begun(
        "all_gather",
        group,
        x,
        lambda pg: pg._allgather_base(forms.moved(into), forms.moved(x), options),
    )
    return Started("all_gather", _among(group), work, lambda: into, (x, into))


def reduce_scatter(
    x: Tensor,
    group: Ranks,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    call: str = "reduce_scatter",
    later: bool = True,
) -> Started:
    """Start a reduce-scatter that sums. Where the parts travel (see collectives.py), ``wait`` adds them."""
    if not later or x.dtype not in forms.NATIVE or not x.numel() or not can_wait(x, group):
        return Started.complete(plain.reduce_scatter(x, group, dim, sizes, call=call))
    dim = plain._dim(x, dim, "reduce_scatter")
    lengths = plain.cut_sizes(x, group, dim, sizes, "reduce_scatter")
    plain._begin("reduce_scatter", group, x, call, Partial("sum"), Shard(dim), dim, op="sum")
    return scattered(x, group, dim, lengths)


def scattered(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int], op: str = "sum", into: Tensor | None = None
) -> Started:
    """Start ``collectives.reduce_scatter``; nobody who watches is told."""
    if op not in ("sum", "avg") or x.dtype not in forms.NATIVE or not x.numel() or not can_wait(x, group):
        return Started.complete(collectives.reduce_scatter(x, group, dim, sizes, op, into))

    def whole(total: Tensor) -> Tensor:
        result = total.movedim(0, dim).contiguous()
        return averaged(result, group.size) if op == "avg" else result

    if collectives.scatters(x, group, sizes, op):
        send = x.movedim(dim, 0).contiguous()
        shape = (sizes[0], *send.shape[1:])
        result = send.new_empty(shape) if into is None else into.view(shape)
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        work = _begun("reduce_scatter", group, send, lambda pg: pg._reduce_scatter_base(result, send, options))
        return Started("reduce_scatter", _among(group), work, lambda: whole(result), (send, result))
    turned = x.movedim(dim, 0)
    flat, _, leave, _ = collectives.exchange_of(turned, group, 0, sizes, 0, sizes)
    mine = turned[: sizes[group.index]].shape
    coming = exchanged(flat, group, [mine.numel()] * group.size, leave)
    return coming.then(lambda came: whole(collectives.of_each(came, mine, group).sum(0).to(x.dtype)))


def exchanged(flat: Tensor, group: Group, arrive: list[int], leave: list[int]) -> Started:
    """Start an all-to-all of stretches of a flat tensor, by rank of the process group; nobody who watches is told."""
    arrived, options = flat.new_empty(sum(arrive)), dist.AllToAllOptions()
    work = _begun("all_to_all", group, flat, lambda pg: pg.alltoall_base(arrived, flat, arrive, leave, options))
    return Started("all_to_all", _among(group), work, lambda: arrived, (flat, arrived))


def tag_of(name: str, microbatch: int = 0) -> int:
    """A tag for the messages of one kind and one microbatch, the same on all ranks.

    Example:
        >>> tag_of("forward", 3) == tag_of("forward", 3), tag_of("forward", 3) == tag_of("forward", 4)
        (True, False)
    """
    return zlib.crc32(f"{name} {microbatch}".encode()) & (BACK - 1)


_sends: Kept[list[Started]] = Kept(list)


def isend(x: Tensor, dst: int, tag: int = 0, group: Ranks | None = None, call: str = "send") -> Started:
    """Start sending ``x`` to the rank at place ``dst`` of the group. Nobody has to wait: what is not awaited is kept.

    Args:
        x: may not be written to before the message has arrived, as with ``torch.distributed.isend``.
        tag: the receiver takes the message by it; messages of several microbatches have several tags (``tag_of``).
    """
    made, here = _message("send", x, dst, tag, group, call)
    if here is None:
        return Started.complete(x)
    if _is_recorded():
        _send(x, dst, tag, here.ranks, here.name, call)
        return Started.complete(x)
    dense = forms.dense(x)
    what = _named("send", tag, call)
    with _starting(what, made):
        work = here.process_group.send([forms.moved(dense)], _place(here, dst), tag)
    handle = Started(what, made, work, lambda: x, (x, dense))
    keep(handle)
    return handle


def irecv(x: Tensor, src: int, tag: int = 0, group: Ranks | None = None, call: str = "recv") -> Started:
    """Start filling ``x`` with what the rank at place ``src`` sends under the tag; read it after ``wait``."""
    made, here = _message("recv", x, src, tag, group, call)
    if here is None:
        return Started.complete(x)
    if _is_recorded():  # a node that waits stands where the program does: before, it may have something to send
        return Started("", "", None, lambda: (_receive(x, src, tag, here.ranks, here.name, call), x)[1])
    dense = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    what = _named("recv", tag, call)
    with _starting(what, made):
        work = here.process_group.recv([forms.moved(dense)], _place(here, src), tag)
    return Started(what, made, work, lambda: x if dense is x else x.copy_(dense), (x, dense))


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


def _is_recorded() -> bool:
    return recorded.recorder is not None and recorded.recorder.listens


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


def keep(handle: Started) -> None:
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
    plain._member(here, call)
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
        plain.tell("send", here, x, call, _R, _R, sent=x.nbytes, peer=words)
    return words, None if x.is_meta or trace.faking() else here


def _place(group: Ranks, place: int) -> int:
    """The rank in the process group of the one at a place."""
    return group.order.index(place) if group.order else place


def can_wait(x: Tensor, group: Group) -> bool:
    """Whether a message can be left under way: not where it is written down, or compared with the other ranks' first."""
    seen = trace.tracing() or trace.faking() or check.on or _is_recorded()
    return group.process_group is not None and not x.is_meta and not seen


def _among(group: Group) -> str:
    return f"among ranks {list(group.ranks)}"


def _begun(name: str, group: Group, sent: Tensor, start: Callable[[Any], Any], op: str = "") -> Any:
    if group.clock is not None:  # as of a message that is awaited at once, which it may be on another rank
        group.clock.tick(f"{name}({op})" if op else name, sent.dtype)
    try:
        return start(group.process_group)
    except RuntimeError as fault:
        raise CommunicationError(f"{name} {_among(group)} cannot start on rank {world.get_rank()}: {fault}") from fault
