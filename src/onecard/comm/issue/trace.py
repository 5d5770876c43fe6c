"""Collectives while a program is traced (``make_fx``): a graph can hold them only as torch's functional ones, each awaited.

A process group's own methods leave no trace, or one that nobody waits for: the graph would replay without the message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import fakes as faking
from onecard._torch.names import traces as tracing
from onecard.errors import CommunicationError

__all__ = ["faking", "record", "refuse", "tracing"]


def record(into: Tensor, operator: str, given: Tensor, *rest: Any, process_group: Any) -> None:
    """Run a collective as a functional one that the graph keeps, and fill ``into`` with its awaited result."""
    functional = torch.ops._c10d_functional
    started = getattr(functional, operator)(given, *rest, process_group.group_name)
    into.copy_(functional.wait_tensor(started).view(into.shape))


def refuse(name: str) -> CommunicationError:
    """The error for a message that no graph can hold."""
    return CommunicationError(
        f"{name} cannot be traced: torch has no functional form of it, so the graph would replay without it. Trace what comes "
        "before and after it (make_fx), and run this call eagerly between the two"
    )
