"""How well mixtures of experts balance: tokens for each expert, the share that was dropped, and both as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

SHOWN = 16  # experts whose tokens a table lists


@dataclass(frozen=True)
class Balance:
    """What a layer's router did since it was asked before, over the whole batch.

    Attributes:
        tokens: for each expert, those that reached it.
        choices: how often tokens chose an expert; ``dropped``: the share that reached none.

    Example:
        >>> Balance([30, 10], 80).dropped, Balance([30, 10], 80).largest
        (0.5, 1.5)
    """

    tokens: list[int]
    choices: int

    @property
    def dropped(self) -> float:
        """The share of choices that reached no expert."""
        return 1 - sum(self.tokens) / self.choices if self.choices else 0.0

    @property
    def largest(self) -> float:
        """The tokens of the expert that has most, over the mean: 1 is balanced."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def idle(self) -> int:
        """How many experts had none."""
        return self.tokens.count(0)


def table(layers: Mapping[str, Balance]) -> Table:
    """One row for each layer.

    Example:
        >>> table({"layers.0.experts": Balance([3, 1], 4)}).row_count
        1
    """
    made = Table(
        "layer", "choices", "dropped", "largest / mean", "idle", "tokens for each expert", title="Balance of experts"
    )
    for name, found in layers.items():
        shown = " ".join(map(str, found.tokens[:SHOWN])) + (" ..." if len(found.tokens) > SHOWN else "")
        numbers = (str(found.choices), f"{found.dropped:.1%}", f"{found.largest:.2f}", str(found.idle))
        made.add_row(name or "(it)", *numbers, shown)
    return made
