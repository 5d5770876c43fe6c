"""One message: a collective among the ranks of a group, as a value, and the one call that sends it.

What is eager, started, differentiable, replayed, Paddle's or Megatron's comes here with buffers that are ready.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard import recorded
from onecard._torch.names import AllgatherOptions
from onecard.comm.agree import check, sparse_check
from onecard.comm.agree.clock import PATIENCE
from onecard.comm.base import flight
from onecard.comm.base import record as told
from onecard.comm.issue import trace
from onecard.comm.issue.by_gpu import Begin, by_way
from onecard.comm.issue.forms import REDUCE, at_once, moved
from onecard.comm.issue.groups import Group
from onecard.comm.issue.handle import Handle
from onecard.comm.shm.channel import MISMATCH
from onecard.comm.world import gone, world
from onecard.errors import CommunicationError

NOTHING = torch.empty(0, device="cpu")
"""What a barrier sends."""
KINDS = 256  # of messages that a group keeps: their sizes may be data
Ready = Callable[[Any], Any]
"""What is done to options of torch's: nothing, or a mark that the result is awaited right after."""


class Message:
    """A collective, without its tensors.

    Attributes:
        group: whose.
        operation: the name of torch's functional collective; "barrier".
        rest: its arguments besides the tensors and the group.
        name: what people and other ranks are told.
    """

    __slots__ = ("__dict__", "_begin", "group", "name", "operation", "rest")

    def __init__(self, group: Group, operation: str, rest: tuple[Any, ...]) -> None:
        self.group, self.operation, self.rest = group, operation, rest
        self.name, self._begin = _BEGIN[operation]

    @cached_property
    def now(self) -> Begin:
        """Begin it, to be awaited right after."""
        return self._made(at_once)

    @cached_property
    def later(self) -> Begin:
        """Begin it, to be left under way."""
        return self._made(lambda options: options)

    def _made(self, ready: Ready) -> Begin:
        begin = self._begin(self.group.process_group, ready, *self.rest)
        return begin if self.operation == "barrier" else by_way(begin, self.group.process_group)

    @cached_property
    def ticks(self) -> str:
        """What the group's clock notes."""
        return f"{self.name}({self.rest[0]})" if self.operation == "all_reduce" else self.name

    def send(self, into: Tensor, given: Tensor) -> None:
        """Do it, and tell nobody."""
        if not given.is_meta and (work := self.now(into, given)) is not None:
            work.wait()

    def __str__(self) -> str:
        return f"{self.name} among ranks {list(self.group.ranks)}"


def message(group: Group, operation: str, *rest: Any) -> Message:
    """The message of a kind, of which a group keeps one."""
    key: Hashable = (operation, *(tuple(x) if type(x) is list else x for x in rest))
    found = group.messages.get(key)
    if found is None:
        if len(group.messages) >= KINDS:
            group.messages.clear()
        found = group.messages[key] = Message(group, operation, rest)
    return found


def issue(what: Message, into: Tensor, given: Tensor, later: bool = False) -> Handle:
    """Send ``given``, fill ``into``.

    Args:
        what: the message.
        into, given: contiguous; may share memory where the collective works in place.
        later: leave it under way where that can be: until it is awaited ``given`` is not written to, ``into`` not touched.

    Raises:
        CommunicationError: it failed; says which message, among whom, where this rank stands, and who is gone.
    """
    absent = (
        getattr(given, "refused", None) if type(given) is not Tensor else None
    )  # only other stages of a pipeline have it
    if absent is not None and not recording():  # a step that is written down is cut: who sends has it
        raise absent(what.name)
    if later and can_wait(given, what.group):
        return _started(what, into, given)
    _sent(what, into, given)
    return Handle.complete(into)


def can_wait(x: Tensor, group: Group) -> bool:
    """Whether a message can be left under way: not where it is written down, or compared with the other ranks' first."""
    seen = trace.tracing() or trace.faking() or check.on or recording()
    return group.process_group is not None and not x.is_meta and not seen


def recording() -> bool:
    """Whether somebody writes the step down."""
    return recorded.recorder is not None and recorded.recorder.listens


def _started(what: Message, into: Tensor, given: Tensor) -> Handle:
    clock = what.group.clock
    if clock is not None:  # as of a message that is awaited at once, which it may be on another rank
        clock.tick(what.ticks, given.dtype)
    try:
        work = what.later(into, given)
    except RuntimeError as fault:
        raise CommunicationError(f"{what} cannot start on rank {world.get_rank()}: {fault}") from fault
    return Handle(what.name, f"among ranks {list(what.group.ranks)}", work, lambda: into, (into, given))


def _sent(what: Message, into: Tensor, given: Tensor) -> None:
    group, written = what.group, recording()
    rehearsal = given.is_meta  # shapes without data
    if rehearsal or (written and not recorded.recorder.computes):  # nobody sends it: nothing counts it
        check.nothing_sent()
        if written:
            recorded.recorder.message(what, *((into, given) if rehearsal else (moved(into), moved(given))))
        return
    if what.operation in _FOR_THEMSELVES:
        told.serving.here = ("", "", ())
    traced = trace.tracing()
    if group.clock is not None and not traced:
        group.clock.tick(what.ticks, given.dtype)
    board = flight.board.here
    if board is not None:
        board.enter(what.name, tuple(sorted(group.ranks)), given.nbytes)
    try:
        if check.on:
            check.collective(what.name, group.ranks, given)
        if traced:
            _traced(what, into, given)
        elif written:
            recorded.recorder.message(what, moved(into), moved(given))
        else:
            what.send(into, given)
    except CommunicationError as fault:
        _explain(fault, group)
        raise
    except RuntimeError as fault:
        raise _failed(what, given, fault) from fault
    finally:
        if board is not None:
            board.leave()


def _traced(what: Message, into: Tensor, given: Tensor) -> None:
    if what.operation not in COLLECTIVES:
        raise trace.refuse(what.name)
    trace.record(moved(into), what.operation, moved(given), *what.rest, process_group=what.group.process_group)


def _failed(what: Message, given: Tensor, fault: RuntimeError) -> CommunicationError:
    group = what.group
    why = (
        gone.words(group.ranks) or " A rank that is gone, or that runs another program than the others, shows as this."
    )
    failed = CommunicationError(
        f"{what.name} of {given.nbytes} bytes among ranks {list(group.ranks)} failed on rank {group.ranks[group.index]}: "
        f"{fault}.{why}"
    )
    _explain(failed, group, sent=True)
    return failed


def _explain(fault: CommunicationError, group: Group, sent: bool = False) -> None:
    """Add what is known of the other ranks: what they were about to send, or why one has stopped; ``sent``: it had begun."""
    if check.on:
        return
    clock, apart, found = group.clock, MISMATCH in str(fault), ""
    if clock is not None and (apart or (sent and not clock.carried)):
        found = clock.sides(apart, PATIENCE if "Gone: " not in str(fault) else 0.0)
    if not found and not apart:
        found = sparse_check.stopped()
    if found and found not in str(fault):
        fault.add_note(found)
    elif not found:
        fault.add_note("To see the operator, tensor and line of each rank, run it once with ONECARD_CHECK=1")


def _all_reduce(pg: Any, ready: Ready, op: str) -> Begin:
    options = ready(dist.AllreduceOptions())
    options.reduceOp = dist.ReduceOp(REDUCE[op])
    return lambda into, given: pg.allreduce([into], options)


def _all_gather(pg: Any, ready: Ready, size: int) -> Begin:
    options = ready(AllgatherOptions())
    return lambda into, given: pg._allgather_base(moved(into), moved(given), options)


def _reduce_scatter(pg: Any, ready: Ready, op: str, size: int) -> Begin:
    options = ready(dist.ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(REDUCE[op])
    return lambda into, given: pg._reduce_scatter_base(into, given, options)


def _all_to_all(pg: Any, ready: Ready, into_sizes: list[int], given_sizes: list[int]) -> Begin:
    options = ready(dist.AllToAllOptions())
    return lambda into, given: pg.alltoall_base(moved(into), moved(given), into_sizes, given_sizes, options)


def _all_to_all_pieces(pg: Any, ready: Ready, into_spans: Any, given_spans: Any) -> Begin:
    options = ready(dist.AllToAllOptions())
    return lambda into, given: pg.all_to_all_pieces(moved(into), moved(given), into_spans, given_spans, options)


def _broadcast(pg: Any, ready: Ready, root: int) -> Begin:
    options = ready(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = root, 0
    return lambda into, given: pg.broadcast([moved(into)], options)


def _barrier(pg: Any, ready: Ready) -> Begin:
    options = ready(dist.BarrierOptions())
    return lambda into, given: pg.barrier(options)


_BEGIN: dict[str, tuple[str, Callable[..., Begin]]] = {
    "all_reduce": ("all_reduce", _all_reduce),
    "all_gather_into_tensor": ("all_gather", _all_gather),
    "reduce_scatter_tensor": ("reduce_scatter", _reduce_scatter),
    "all_to_all_single": ("all_to_all", _all_to_all),
    "all_to_all_pieces": ("all_to_all", _all_to_all_pieces),
    "broadcast": ("broadcast", _broadcast),
    "barrier": ("barrier", _barrier),
}
_FOR_THEMSELVES = ("broadcast", "barrier")  # no operator's operands


def name_of(operation: str) -> str:
    """What people and other ranks are told of a collective.

    Example:
        >>> name_of("all_gather_into_tensor")
        'all_gather'
    """
    return _BEGIN[operation][0]


COLLECTIVES = frozenset(_BEGIN) - {"all_to_all_pieces", "barrier"}
"""Those that a graph can hold: torch's functional ones."""


def takes(operation: str, rest: tuple[Any, ...]) -> bool:
    """Whether a collective may be given these values, besides the tensors and the group.

    Example:
        >>> takes("all_reduce", ("sum",)), takes("all_reduce", ("os.system",)), takes("broadcast", ())
        (True, False, False)
    """
    wanted = [*inspect.signature(_BEGIN[operation][1]).parameters][2:]
    return len(rest) == len(wanted) and all(_FITS[name](value) for name, value in zip(wanted, rest, strict=True))


_FITS: dict[str, Callable[[Any], bool]] = {
    "op": lambda v: type(v) is str and v in REDUCE,
    "size": lambda v: type(v) is int,
    "root": lambda v: type(v) is int,
    "into_sizes": lambda v: all(type(n) is int for n in v),
    "given_sizes": lambda v: all(type(n) is int for n in v),
}
