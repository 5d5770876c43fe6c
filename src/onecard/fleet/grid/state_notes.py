"""Notes on a module's state dict, of what its tensors do not say: layers write them while torch collects it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NAME = "_onecard_notes"


@dataclass
class StateNotes:
    """What stands on a state dict.

    Attributes:
        parts: of each parameter of a cut layer what it is a part of.
        stages: of each pipeline whose layers are on several ranks what its names begin with, and for each layer those that
            are one with it.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    stages: list[tuple[str, list[list[int]]]] = field(default_factory=list)


def note(state: Any) -> StateNotes:
    """The notes of a state dict, to be added to."""
    if not hasattr(state, "__dict__"):  # a plain dict, given by the caller of state_dict(destination=...)
        return StateNotes()
    return state.__dict__.setdefault(_NAME, StateNotes())


def noted(state: Any) -> StateNotes | None:
    """The notes of a state dict; None if there are none."""
    return getattr(state, _NAME, None)
