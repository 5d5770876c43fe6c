"""Messages that a program sends itself (``torch.distributed.all_reduce(x)``): values that a recording holds and sends again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onecard import recorded
from onecard._torch.names import OpOverload, TorchDispatchMode, resolve_group, tree_flatten, tree_leaves, tree_unflatten
from onecard.comm.base import record
from onecard.comm.base.state import Kept

Kind = TypeVar("Kind", bound=type)
_FUNCTIONAL = "_c10d_functional"


@dataclass(frozen=True, slots=True)
class OwnSent:
    """One of them, as it runs: torch's name of the call, bytes of the tensors that this rank hands over, the user's line."""

    call: str
    bytes: int
    source: str

    def __str__(self) -> str:
        file, _, line = self.source.rpartition(":")
        return f"your own {self.call} of {self.bytes:,} bytes at {Path(file).name}:{line}"


listeners: Kept[list[Callable[[OwnSent], None]]] = Kept(list)
"""Who is told of each, before it runs."""


around: Kept[Callable[[Callable[..., Any], Any, Any], Any] | None] = Kept(lambda: None)
"""Who does the calls of groups in Python and looks on (``onecard.prove`` on real ranks); None: nobody."""


def tell(call: str, args: Any, kwargs: Any) -> None:
    """Tell who listens of a message that is about to run."""
    if listeners.here:
        parts = [
            n for x in (*args, *kwargs.values()) if (n := [t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor)])
        ]
        said = OwnSent(call.strip("_"), sum(parts[:2][-1]) if parts else 0, record.user_line())  # results come first
        for listener in list(listeners.here):
            listener(said)


@contextmanager
def listening(listener: Callable[[OwnSent], None]) -> Iterator[None]:
    """Inside, a listener is told of every message of the program's own."""
    listeners.here.append(listener)
    try:
        # A mode costs all operators a look, and sparse checks pause in one: not where groups say all themselves.
        with nullcontext() if dist.is_initialized() and dist.get_backend() == "shm" else _Seen():
            yield
    finally:
        listeners.here.remove(listener)


class _Seen(TorchDispatchMode):
    """Sees messages of process groups that torch's dispatcher sees: NCCL's and Gloo's. Those in Python say themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        sends = func.namespace == "c10d" or (is_functional(func) and name != "wait_tensor")
        if not sends or not record.asked_by_user():
            return func(*args, **(kwargs or {}))
        tell(name, args, kwargs or {})
        told, listeners.here[:] = [*listeners.here], []  # what it is made of is no message more
        try:
            return func(*args, **(kwargs or {}))
        finally:
            listeners.here[:] = told


class OwnMessage:
    """A call of a process group, or of torch's operator for it, less its tensors. Two are equal if they send alike."""

    __slots__ = ("_call", "_given", "_tree", "key")

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, self._tree = tree_flatten((tuple(args), dict(kwargs)))
        self._call = call
        self._given = [None if isinstance(x, Tensor) else (x,) for x in leaves]
        self.key = (getattr(call, "__name__", str(call)), *(word for x in leaves if (word := _word(x)) is not None))

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send it again with these tensors in the places of its own, and wait for it."""
        rest = iter(tensors)
        args, kwargs = tree_unflatten([next(rest) if x is None else x[0] for x in self._given], self._tree)
        if isinstance(self._call, types.FunctionType):  # of a group in Python, which does not say so itself
            tell(self._call.__name__, args[1:], kwargs)
        wait_for(self._call(*args, **kwargs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnMessage) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return " ".join(map(str, self.key))


_SAID = ("reduceOp", "rootRank", "rootTensor", "sourceTensor")


def _word(x: Any) -> Any:
    """What of an argument tells two messages apart; None: nothing."""
    if isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, dist.ProcessGroup):
        return x.group_name
    if isinstance(x, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(x).group_name
        except RuntimeError:  # a reduction, which torch does not take out of its box
            return None
    said = [getattr(x, name) for name in _SAID if hasattr(x, name)]
    return tuple(str(getattr(value, "op", value)).rpartition(".")[2] for value in said) or None


def ranks_of(args: Sequence[Any]) -> tuple[int, ...] | None:
    """The ranks of the process group that is among a call's arguments, or is named there; None: there is none."""
    for x in args:
        with suppress(RuntimeError, ValueError, KeyError):
            if isinstance(x, torch.ScriptObject):
                x = dist.ProcessGroup.unbox(x)
            elif isinstance(x, str) and resolve_group is not None:
                x = resolve_group(x)
            if isinstance(x, dist.ProcessGroup):
                return tuple(dist.get_process_group_ranks(x))
    return None


def is_under_way(kind: type) -> bool:
    """Whether this is torch's class of results of functional collectives, which wait when they are used."""
    return kind.__name__ == "AsyncCollectiveTensor"


def only_wraps(func: Any) -> bool:
    """Whether an operator makes such a result of a tensor, and does nothing else."""
    return func.namespace == _FUNCTIONAL and "_wrap_tensor" in str(func)


def is_functional(func: Any) -> bool:
    """Whether an operator is one of torch's functional collectives, or the wait for it."""
    return func.namespace == _FUNCTIONAL and not only_wraps(func)


def functional(name: str, *args: Any, **kwargs: Any) -> Any:
    """One of them, awaited at once: what waits later is another call, of which a graph could lose sight."""
    result = getattr(torch.ops._c10d_functional, name).default(*args, **kwargs)
    for x in tree_leaves(result) if name != "wait_tensor" else ():
        torch.ops._c10d_functional.wait_tensor.default(x)
    return result


def in_functional(recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """It runs while a step is recorded or compared: a call of ``functional``. What was awaited is not awaited again."""
    name = func._schema.name.rpartition("::")[2]
    return args[0] if name == "wait_tensor" else recorder.call(functional, (name, *args), kwargs)


class _NotSent(dist.Work):
    """There is nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


_not_sent = _NotSent()  # one for all: torch keeps no Python object alive in its box


def not_sent(func: Any, args: Any) -> Any:
    """What a call gives that is written down without being sent: its tensors as they are."""
    if not isinstance(func, OpOverload):  # of a group in Python
        return _not_sent
    made = [_not_sent.boxed() if "Work" in str(r.type) else args[0] for r in func._schema.returns]
    return tuple(made) if len(made) > 1 else made[0] if made else None


def wait_for(result: Any) -> None:
    """Wait for what such a call gives, beside tensors."""
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        work = dist.Work.unbox(work)
    if isinstance(work, dist.Work):
        work.wait()


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors of a call, in order."""
    return [x for x in tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]


def send_own(tensors: list[Tensor], message: OwnMessage) -> None:
    """A message of the program's own: all its tensors count as written."""
    message.send(tensors)


recorded.register(send_own, 0)
recorded.register(functional, 1)  # some write to what they are given

_NO_MESSAGES = {"shutdown", "abort", "set_timeout"}


def shown(*parts: type) -> Callable[[Kind], Kind]:
    """Decorate a class of process groups in Python, which torch's dispatcher does not see: a recorder is told of the messages.

    Args:
        parts: the classes that it is made of whose public methods send; its own do, too.
    """

    def decorate(kind: Kind) -> Kind:
        for part in (*parts, kind):
            for name, call in [*vars(part).items()]:
                public = not name.startswith("_") or name.endswith("_base")
                shown_before = hasattr(call, "__wrapped__")  # a part's, which the class has by now
                if isinstance(call, types.FunctionType) and public and name not in _NO_MESSAGES and not shown_before:
                    setattr(kind, name, _shown(call))
        return kind

    return decorate


def _shown(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = recorded.recorder
        if listeners.here and record.asked_by_user():
            tell(call.__name__, args[1:], kwargs)
        if recorder is None or not recorder.listens:
            looks_on = around.here
            return call(*args, **kwargs) if looks_on is None else looks_on(call, args, kwargs)
        return recorder.own(call, args, kwargs)

    return run
