"""Tensors of the CPU in a group that carries a GPU's alone, as NCCL's does: they go by way of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch

Begin = Callable[[Tensor, Tensor], Any]


def way(process_group: Any) -> torch.device | None:
    """The device over which all goes that a group sends; None where it carries what lies on the CPU."""
    device = torch.device(_torch.object_device(process_group))
    return None if device.type == "cpu" else device


def by_way(begin: Begin, process_group: Any) -> Begin:
    """The same message, of tensors on the CPU too: these have ended when it returns."""
    device = way(process_group)
    if device is None:
        return begin

    def through(into: Tensor, given: Tensor) -> Any:
        if not given.is_cpu:
            return begin(into, given)
        arrives = into.to(device, copy=True)
        work = begin(arrives, arrives if given is into else given.to(device, copy=True))
        if work is not None:
            work.wait()
        into.copy_(arrives)
        return None

    return through
