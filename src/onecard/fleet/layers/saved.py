"""What a checkpoint asks of fleet's models: which tensors are parts, and which layers of a pipeline are on other ranks.

A state dict carries notes of it, so that ``{"model": model.state_dict()}`` is saved as ``{"model": model}`` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onecard.checkpoint.format import portions
from onecard.fleet.grid.state_notes import StateNotes, noted
from onecard.fleet.grid.topology import begun, get_hybrid_communicate_group
from onecard.train.shard import Shard


@dataclass(frozen=True)
class SavedNotes:
    """The notes of a state dict, for a checkpoint."""

    noted: StateNotes
    parts: Mapping[str, Shard] = field(default_factory=dict)

    def names(self, key: str) -> list[tuple[str, int]] | None:
        """The names that one card has for a name of a pipeline's layer, each with its place in the list of layers.

        Example:
            >>> SavedNotes(StateNotes(stages=[("", [[0, 2], [1], [0, 2]])])).names("2.weight")
            [('0.weight', 0), ('2.weight', 2)]
        """
        for prefix, alike in self.noted.stages:
            number, dot, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and dot and number.isdecimal() and int(number) < len(alike):
                return [(f"{prefix}{i}.{rest}", i) for i in alike[int(number)]]
        return None


def _notes(state: Mapping[str, Any]) -> SavedNotes | None:
    found = noted(state)
    if found is None:
        return None
    return SavedNotes(found, {name: what for name, what in found.parts.items() if not what.is_all()})


def _grid() -> dict[str, int]:
    return get_hybrid_communicate_group().topology() if begun() else {}


portions.known.append(portions.Knowledge(_notes, _grid))
