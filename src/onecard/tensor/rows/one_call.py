"""Calls on rows as single nodes of a recording: how many rows a rank has is data, so nothing inside may be written down.

A node holds the call, with tensors of fixed sizes and ``Rows`` taken out of its arguments; a replay makes the call again, on
what it has then. So sizes are never constants: they are asked for anew, where the rows are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch.names import OpOverload
from onecard.comm.base import record
from onecard.errors import RecordingError
from onecard.moves.resharding import Step
from onecard.random.key import Key
from onecard.recorded import one_node
from onecard.rules.call import schema_of
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.rows.halves import Half
from onecard.tensor.spec import Spec


class Taken(NamedTuple):
    """Stands for an operand of a call, or for one of its results: which one, and the spec of a distributed tensor."""

    number: int
    spec: Spec | None


class RowsCall:
    """A call on rows.

    Attributes:
        function: what is called; ``arguments``: with ``Taken`` for each tensor; ``operator``: of torch's, if it is one.
        results: likewise, known once it has run: how tensors lie follows from axes and shapes, never from the numbers.
        messages, each: how many there were as it first ran, and the bytes of its largest operand for each rank that they join;
            both are the same on all ranks.
        sent, whole, share, accessed: for who prices it, as it first ran: the steps that sent; facts of the operands as on one
            card; this rank's share of the rows; bytes that it read and made here.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        self.function, self.arguments, self.results = function, arguments, None
        self.operator: OpOverload | None = next((a for a in arguments if isinstance(a, OpOverload)), None)
        self.sent: tuple[Step, ...] = ()
        self.messages, self.each = 0, 0
        self.whole: tuple[Any, ...] = ()
        self.share, self.accessed = 1.0, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowsCall) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        what = self.operator or self.function.__name__.strip("_")
        return f"rows: {str(what).removesuffix('.default')}"

    def _all(self) -> Any:
        return self.function, self.arguments, self.results

    @property
    def writes(self) -> bool:
        """Whether it writes to rows."""
        return self.operator is not None and bool(schema_of(self.operator).written)

    def first(self, given: list[Any]) -> list[Any]:
        """Make the call, and note what it takes."""
        made: list[Any] = []
        steps = list[Step]()

        def told(notice: record.Notice) -> None:
            steps.append(notice.step)

        record.observers.here.append(told)
        try:
            self.results = _apart(self.function(*together(self.arguments, given)), made)
        finally:
            record.observers.here.remove(told)
        self.messages, self.sent = len(steps), tuple(step for step in steps if step.bytes)
        largest = max((math.prod(f[0]) * f[2].itemsize for f in map(_whole, given) if f is not None), default=0)
        self.each = largest // max((step.target.mesh.shape[step.axis] for step in steps), default=1)
        self.whole = tuple(_whole(x) for x in given)
        self.accessed = sum(x.nbytes for x in map(held_of, [*given, *made]) if x is not None)
        rows = [x for x in (*given, *made) if _is_rows(x)]
        # Nothing is held outside of the mesh, as of another stage's rows.
        lengths = [(x._held.shape[x._along], x.shape[x._along]) for x in rows if x._held.dim() == x.dim()]
        self.share = lengths[0][0] / max(1, lengths[0][1]) if lengths else 1.0
        return made

    @property
    def halves(self) -> bool:
        """Whether it may be made in two halves (see ``halves``): its message, and all else."""
        return self.messages == 1 and getattr(self.function, "moves_once", False)


@one_node(in_files=False)
def start(call: RowsCall, given: list[Any]) -> Half:
    """Send what the call sends, and leave it under way."""
    made = Half()
    made.start(lambda: _made(call, given))
    return made


@one_node(in_files=False)
def run(call: RowsCall, given: list[Any], started: Half | None = None) -> list[Any]:
    """Make the call; its tensors. ``started``: its first half.

    Raises:
        RecordingError: they lie otherwise than when the call was recorded.
    """
    return _made(call, given) if started is None else started.finish(lambda: _made(call, given))


def _made(call: RowsCall, given: list[Any]) -> list[Any]:
    if call.results is NotImplemented and call.writes:
        return []  # that nobody else sees the rows it would write to is known only while the program runs
    if call.results is None:
        return call.first(given)
    made: list[Any] = []
    results = _apart(call.function(*together(call.arguments, given)), made)
    if call.results != results:
        raise RecordingError(f"{call!r} gives {results} in a replay, and gave {call.results} as it was recorded")
    return made


def in_halves(function: Callable[..., Any]) -> Callable[..., Any]:
    """``in_one`` of what moves rows once, and until then does only what may be done twice."""
    function.moves_once = True  # type: ignore[attr-defined]
    return in_one(function)


def in_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function on rows that a recording keeps as one node. It takes and gives tensors, and values that are always the same."""

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        recorder = recorded.recorder
        if recorder is None or not recorder.listens:
            return function(*args)
        given: list[Any] = []
        call = RowsCall(function, _apart(args, given))
        made = run(call, given)
        return together(call.results, made)

    return called


def seen_as(x: Any) -> Any:
    """What a recording knows a tensor by: its part on this rank; rows, which would settle, by themselves."""
    return x._local if isinstance(x, DistTensor) and not x._in_rows else x


def _is_rows(x: Any) -> bool:
    return isinstance(x, DistTensor) and x._in_rows


def held_of(x: Any) -> Tensor | None:
    """The memory of a tensor, or of rows, on this rank; None of anything else."""
    return x._held if _is_rows(x) else x if isinstance(x, Tensor) else None


def _whole(x: Any) -> Any:
    """Shape, strides and dtype of a tensor as it is on one card; of a part of one as it is here."""
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else None


def _apart(value: Any, taken: list[Any]) -> Any:
    """A value with what a recording follows taken out: tensors, and numbers, which may be those of an optimizer."""
    if isinstance(value, Tensor | float | recorded.Opaque | Key | torch.Generator):
        part = _part(value)
        taken.append(part)
        return Taken(len(taken) - 1, None if part is value else value._spec)  # type: ignore[union-attr]
    if type(value) in (list, tuple):
        return type(value)(_apart(v, taken) for v in value)
    if type(value) is dict:
        return {k: _apart(v, taken) for k, v in value.items()}
    return value


def _part(value: Any) -> Any:
    """What a recording knows a value by. A sum that rows may need is made ahead: in the call it would be made in its memory."""
    if isinstance(value, DistTensor) and not value._in_rows:
        value._refresh()
        if value._spec.layout.pending:
            value._become(value._spec.layout.reduced(), "rows", "operand", "whole for rows of any rank", explicit=False)
    return seen_as(value)


def together(value: Any, taken: list[Any], put: Callable[[Any, Spec], Any] = wrap) -> Any:
    """A value with its tensors put back. A distributed one is another object: what is changed of it, nobody else sees.

    ``put`` makes it of its part and its spec.
    """
    kind = type(value)
    if kind is Taken:
        found = taken[value.number]
        return found if value.spec is None else put(found, value.spec)
    if kind in (list, tuple):
        return kind(together(v, taken, put) for v in value)
    if kind is dict:
        return {k: together(v, taken, put) for k, v in value.items()}
    return value
