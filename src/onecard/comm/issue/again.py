"""Messages of a recording, sent again, on buffers that are there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard.comm.base import record
from onecard.comm.issue import message as messages
from onecard.comm.issue.groups import Group, group
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.message import COLLECTIVES, issue, takes
from onecard.comm.shm.group import ShmGroup
from onecard.place.mesh import ProcessMesh
from onecard.place.reductions import REDUCTIONS, reduction

Send = Callable[[Tensor, Tensor], Any]


class Line(NamedTuple):
    """The ranks of a message: those along one axis of a mesh through this process."""

    mesh: ProcessMesh
    axis: int

    def __str__(self) -> str:
        return self.mesh.dim_names[self.axis]


def message(
    into: Tensor, given: Tensor, operator: str, rest: tuple[Any, ...], line: Line, later: bool = False
) -> Handle | None:
    """Send ``given``, fill ``into``. ``operator`` and ``rest`` are those of torch's functional collectives, less the group.

    ``later``: only start it; ``wait`` ends it. Until then ``given`` may not be written to, ``into`` not be touched.
    """
    return sender(operator, rest, line, later)(into, given)


def wait(handle: Handle | None, into: Tensor, given: Tensor) -> None:
    """End a message that was started: ``into`` is filled then. It names the two tensors so that they live until here."""
    if handle is not None:
        handle.wait()


def sender(operator: str, rest: tuple[Any, ...], line: Line, later: bool = False) -> Send:
    """``message`` with all but the tensors decided."""
    made = messages.message(group(*line), operator, *rest)
    serving = ("recording", operator, ())

    def send(into: Tensor, given: Tensor) -> Handle:
        record.serving.here = serving
        return issue(made, into, given, later)

    return send


def one_by_one(line: Line, op: str, dtype: torch.dtype) -> bool:
    """Whether the bits of each element of a reduction are those of a fold over the elements at its place, in the order of the
    ranks: then they depend neither on what travels beside it nor on which collective reduces it.

    Shared memory adds so; what Gloo and NCCL do depends on the place in the message, which of two ranks does not show.
    """
    found = group(*line)
    exact = reduction(op).exact or (not dtype.is_floating_point and not dtype.is_complex)
    return op in REDUCTIONS and (exact or found.size <= 2 or isinstance(found.process_group, ShmGroup))


__all__ = ["COLLECTIVES", "Group", "Handle", "Line", "message", "one_by_one", "sender", "takes", "wait"]
