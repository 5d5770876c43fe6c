"""What is noted of a tensor where a program is cut into stages: which have it, whether this rank does, who reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.comm.base.state import Kept

_STAGE, _READ = "_onecard_stage", "_onecard_read"

own_stages: Kept[tuple[int, ...]] = Kept(tuple)
"""Which this rank has of a program that is cut into stages; (): it has not begun as such."""


def note_stage(tensor: Tensor, here: bool, stages: tuple[int, ...]) -> None:
    """Note that only some stages of a pipeline have a tensor, and whether it is here: else it has no memory."""
    setattr(tensor, _STAGE, (here, stages))


def note_read(tensor: Tensor) -> None:
    """Note that a step that is cut into stages takes a tensor for what it is on every rank."""
    setattr(tensor, _READ, True)


def is_read(tensor: Any) -> bool:
    """Whether a step that is cut into stages does."""
    return hasattr(tensor, _READ)


def stages_of(tensor: Any) -> tuple[int, ...]:
    """The stages that have a tensor; () of one that all ranks have."""
    found: tuple[int, ...] = getattr(tensor, _STAGE, (True, ()))[1]
    return found


def is_staged(tensor: Any) -> bool:
    """Whether other ranks of a pipeline may not have a tensor."""
    return hasattr(tensor, _STAGE) or is_elsewhere(tensor)


def is_elsewhere(tensor: Any) -> bool:
    """Whether only other ranks of a pipeline have a tensor: this one's has no memory, and neither has a view of it."""
    for x in (tensor, getattr(tensor, "_local", None)):  # what is made of a distributed one is noted where its part is
        if hasattr(x, _STAGE):
            return not getattr(x, _STAGE)[0]
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and not tensor.is_meta and not tensor.untyped_storage().nbytes()
