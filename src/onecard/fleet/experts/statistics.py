"""What a layer counts of its router: tokens for each expert, the share that was dropped. Summed when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.train.balance import Balance


class Counts:
    """What a layer counts on this rank."""

    def __init__(self, experts: int) -> None:
        self._tokens = torch.zeros(experts + 1, dtype=torch.int64, device="cpu")

    def add(self, reached: Tensor | None, choices: Any) -> None:
        """Rows that go to each expert; ``choices``: with those that are dropped."""
        if reached is not None:
            self._tokens = self._tokens.to(reached.device)
            self._tokens[:-1] += reached
        if isinstance(choices, Tensor):
            self._tokens = self._tokens.to(choices.device)
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
