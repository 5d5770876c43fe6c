"""Memory of large results that is kept from step to step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onecard import recorded
from onecard.tensor.aliasing import memory


class Room:
    """Memory of large results from step to step: fresh pages cost more than what is written to them.

    A result is taken again when nobody else has it any more.
    """

    LEAST = 16 * 2**20  # bytes; what is smaller the allocator keeps itself

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}

    def take(self, key: Any, numel: int, like: Tensor) -> Tensor | None:
        """Memory for a result; None where there is nothing to gain."""
        if like.device.type != "cpu" or numel * like.element_size() < self.LEAST or recorded.recorder is not None:
            return None
        found = self._known.get(key)
        if found is None or found.numel() != numel or found.dtype != like.dtype:
            found = self._known[key] = like.new_empty(numel)
        return found if memory.users(found) == 1 else None
