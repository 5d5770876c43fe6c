"""Collectives while a program is traced (``make_fx``): a graph can hold them only as torch's functional ones, each awaited.

A process group's own methods leave no trace, or one that nobody waits for: the graph would replay without the message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.errors import CommunicationError

_mode_of = torch._C._get_dispatch_mode
_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def tracing() -> bool:
    """Whether ``make_fx`` is recording what runs now."""
    return _mode_of(_PROXY) is not None


def faking() -> bool:
    """Whether tensors that are made now have no data."""
    return _mode_of(_FAKE) is not None


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
