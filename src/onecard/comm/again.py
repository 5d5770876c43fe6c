"""Messages of a recording, sent again: the collectives of ``collectives.py`` on buffers that are there already."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onecard._torch import AllgatherOptions
from onecard.comm import collectives, forms, record, started
from onecard.comm.groups import Group, group
from onecard.comm.shm.group import ShmGroup
from onecard.comm.started import Started
from onecard.mesh import ProcessMesh
from onecard.reductions import REDUCTIONS, reduction

Send = Callable[[Tensor, Tensor], Any]


class Line(NamedTuple):
    """The ranks of a message: those along one axis of a mesh through this process."""

    mesh: ProcessMesh
    axis: int

    def __str__(self) -> str:
        return self.mesh.dim_names[self.axis]


def message(
    into: Tensor, given: Tensor, operator: str, rest: tuple[Any, ...], line: Line, later: bool = False
) -> Started | None:
    """Send ``given``, fill ``into``. ``operator`` and ``rest`` are those of torch's functional collectives, less the group.

    ``later``: only start it; ``wait`` ends it. Until then ``given`` may not be written to, ``into`` not be touched.
    """
    return sender(operator, rest, line, later)(into, given)


def wait(handle: Started | None, into: Tensor, given: Tensor) -> None:
    """End a message that was started: ``into`` is filled then. It names the two tensors so that they live until here."""
    if handle is not None:
        handle.wait()


def sender(operator: str, rest: tuple[Any, ...], line: Line, later: bool = False) -> Send:
    """``message`` with all but the tensors decided."""
    found = group(*line)
    name, op, start = _START[operator](found.process_group, _as_it_is if later else forms.at_once, *rest)
    serving = ("recording", operator, ())

    def send(into: Tensor, given: Tensor) -> None:
        record.serving.here = serving
        collectives._wait(name, found, given, lambda: start(into, given), None, op)

    def begin(into: Tensor, given: Tensor) -> Started | None:
        if given.is_meta:
            return None
        record.serving.here = serving
        work = started._begun(name, found, given, lambda _: start(into, given), op)
        return Started(name, f"among ranks {list(found.ranks)}", work, lambda: into, (into, given))

    return begin if later else send


def one_by_one(line: Line, op: str, dtype: torch.dtype) -> bool:
    """Whether the bits of each element of a reduction are those of a fold over the elements at its place, in the order of the
    ranks: then they depend neither on what travels beside it nor on which collective reduces it.

    Shared memory adds so; what Gloo and NCCL do depends on the place in the message, which of two ranks does not show.
    """
    found = group(*line)
    exact = reduction(op).exact or (not dtype.is_floating_point and not dtype.is_complex)
    return op in REDUCTIONS and (exact or found.size <= 2 or isinstance(found.process_group, ShmGroup))


def _as_it_is(options: Any) -> Any:
    return options


Ready = Callable[[Any], Any]
"""What is done to options: nothing, or a mark that the result is awaited right after."""


def _all_reduce(pg: Any, ready: Ready, op: str) -> Any:
    options = ready(dist.AllreduceOptions())
    options.reduceOp = dist.ReduceOp(forms.REDUCE[op])
    return "all_reduce", op, lambda into, given: pg.allreduce([into], options)


def _all_gather(pg: Any, ready: Ready, size: int) -> Any:
    options = ready(AllgatherOptions())
    return "all_gather", "", lambda into, given: pg._allgather_base(into, given, options)


def _reduce_scatter(pg: Any, ready: Ready, op: str, size: int) -> Any:
    options = ready(dist.ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(forms.REDUCE[op])
    return "reduce_scatter", "", lambda into, given: pg._reduce_scatter_base(into, given, options)


def _all_to_all(pg: Any, ready: Ready, into_sizes: list[int], given_sizes: list[int]) -> Any:
    options = ready(dist.AllToAllOptions())
    return "all_to_all", "", lambda into, given: pg.alltoall_base(into, given, into_sizes, given_sizes, options)


def _broadcast(pg: Any, ready: Ready, root: int) -> Any:
    options = ready(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = root, 0
    return "broadcast", "", lambda into, given: pg.broadcast([into], options)


_START: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}
COLLECTIVES = frozenset(_START)


def takes(operator: str, rest: tuple[Any, ...]) -> bool:
    """Whether a collective may be given these values, besides the tensors and the line.

    Example:
        >>> takes("all_reduce", ("sum",)), takes("all_reduce", ("os.system",)), takes("broadcast", ())
        (True, False, False)
    """
    wanted = [*inspect.signature(_START[operator]).parameters][2:]
    return len(rest) == len(wanted) and all(_FITS[name](value) for name, value in zip(wanted, rest, strict=True))


_FITS: dict[str, Callable[[Any], bool]] = {
    "op": lambda v: type(v) is str and v in forms.REDUCE,
    "size": lambda v: type(v) is int,
    "root": lambda v: type(v) is int,
    "into_sizes": lambda v: all(type(n) is int for n in v),
    "given_sizes": lambda v: all(type(n) is int for n in v),
}
__all__ = ["COLLECTIVES", "Group", "Line", "Started", "message", "one_by_one", "sender", "takes", "wait"]
