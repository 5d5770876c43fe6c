"""How well a router balances: tokens for each expert, the share that was dropped. Counted as they come, summed when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks


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


class Counts:
    """What a layer counts on this rank."""

    def __init__(self, experts: int) -> None:
        self._tokens = torch.zeros(experts + 1, dtype=torch.int64)

    def add(self, reached: Tensor | None, choices: Any) -> None:
        """Rows that go to each expert; ``choices``: with those that are dropped."""
        if reached is not None:
            self._tokens = self._tokens.to(reached.device)
            self._tokens[:-1] += reached
        self._tokens[-1] += choices

    def take(self, groups: Sequence[Ranks | None]) -> Balance:
        """Summed along groups; and begin anew."""
        whole = self._tokens
        for group in groups:
            if group is not None and group.size > 1:
                whole = plain.all_reduce(whole, group, call="statistics of experts")
        self._tokens = torch.zeros_like(whole)
        *tokens, choices = whole.tolist()
        return Balance(tokens, choices)
