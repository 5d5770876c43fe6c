"""Messages of a recording, sent again: the collectives of ``collectives.py`` on buffers that are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from onecard.comm import collectives, record
from onecard.comm.groups import Group, group
from onecard.mesh import ProcessMesh

Send = Callable[[Tensor, Tensor], None]


class Line(NamedTuple):
    """The ranks of a message: those along one axis of a mesh through this process."""

    mesh: ProcessMesh
    axis: int

    def __str__(self) -> str:
        return self.mesh.dim_names[self.axis]


def message(into: Tensor, given: Tensor, operator: str, rest: tuple[Any, ...], line: Line) -> None:
    """Send ``given``, fill ``into``. ``operator`` and ``rest`` are those of torch's functional collectives, less the group."""
    sender(operator, rest, line)(into, given)


def sender(operator: str, rest: tuple[Any, ...], line: Line) -> Send:
    """``message`` with all but the tensors decided."""
    found = group(*line)
    name, op, start = _START[operator](found.process_group, *rest)
    serving = ("recording", operator, ())

    def send(into: Tensor, given: Tensor) -> None:
        record.serving.here = serving
        collectives._wait(name, found, given, lambda: start(into, given), None, op)

    return send


def _all_reduce(pg: Any, op: str) -> Any:
    options = collectives._OPTIONS[op]
    return "all_reduce", op, lambda into, given: pg.allreduce([into], options)


def _all_gather(pg: Any, size: int) -> Any:
    return "all_gather", "", lambda into, given: pg._allgather_base(into, given, collectives._GATHER)


def _reduce_scatter(pg: Any, op: str, size: int) -> Any:
    options = collectives._at_once(dist.ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(collectives._REDUCE[op])
    return "reduce_scatter", "", lambda into, given: pg._reduce_scatter_base(into, given, options)


def _all_to_all(pg: Any, into_sizes: list[int], given_sizes: list[int]) -> Any:
    options = collectives._EXCHANGE
    return "all_to_all", "", lambda into, given: pg.alltoall_base(into, given, into_sizes, given_sizes, options)


def _broadcast(pg: Any, root: int) -> Any:
    options = collectives._at_once(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = root, 0
    return "broadcast", "", lambda into, given: pg.broadcast([into], options)


_START: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}
__all__ = ["Group", "Line", "message", "sender"]
