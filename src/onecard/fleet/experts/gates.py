"""Paddle's routers: which experts a token goes to, with which weights, and the loss that balances them.

A router computes in float32, whatever its tokens are. What it counts, and the loss that it makes of it, are of the whole batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard._torch import names as _torch
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.experts.batch import Batch, chosen, most_probable, within_capacity

POLICIES = ("position", "probability")


class BaseGate(nn.Module):
    """A router. ``forward(x) -> (weights, experts)``: (tokens, k) each, and -1 for a choice that is dropped.

    Attributes:
        tot_expert: how many experts there are on all ranks.
        batch: the tokens of all ranks, padding included; ``MoELayer`` says it before each forward.
        loss: of the last forward; ``loss_weight``: what it is multiplied with in ``fleet.router_loss``.

    Source: ``paddle.incubate.distributed.models.moe.BaseGate``.
    """

    def __init__(self, num_expert: int, world_size: int = 1, group: Ranks | None = None) -> None:
        super().__init__()
        self.num_expert, self.world_size, self.tot_expert = num_expert, world_size, num_expert * world_size
        self.batch = Batch(group, 1 if group is None else group.size)
        self.loss: Tensor | None = None
        self.loss_weight = 1.0
        self.chosen: Tensor | None = None
        """(experts,): how often each was chosen in the last forward before anything was dropped, over the whole batch."""

    @property
    def has_loss(self) -> bool:
        """Whether there is one."""
        return self.loss is not None

    def set_loss(self, loss: Tensor) -> None:
        """Keep a forward's loss; not that of one that backward runs again (recompute)."""
        if not _torch.in_backward():
            self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """The loss of the last forward, not yet multiplied with ``loss_weight``; gone after it, unless ``clear`` is False."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loss": None, "chosen": None, "batch": Batch()}


class NaiveGate(BaseGate):
    """The k largest scores of a linear layer, as they are.

    Args:
        d_model: width of a token.
        num_expert: experts of each rank; ``world_size``: so many ranks have them.
        topk: experts of a token.

    Source: ``paddle.incubate.distributed.models.moe.NaiveGate``.

    Example:
        >>> weights, experts = NaiveGate(4, 3, 1, topk=2)(torch.ones(5, 4))
        >>> weights.shape, experts.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int = 1,
        topk: int = 2,
        group: Ranks | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_expert, world_size, group)
        if not 1 <= topk <= self.tot_expert:
            raise FleetError(
                f"{type(self).__name__}: topk is {topk}, of {self.tot_expert} experts; want 1 to as many as there are"
            )
        self.gate = nn.Linear(d_model, self.tot_expert, device=device, dtype=dtype)
        self.top_k = topk

    def scores(self, x: Tensor) -> Tensor:
        """(tokens, experts), float32."""
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.gate.bias is None else self.gate.bias.to(wide)
            return F.linear(x.to(wide), self.gate.weight.to(wide), bias)

    def forward(self, x: Tensor, return_all_scores: bool = False) -> Any:
        """(tokens, d_model) -> weights and experts, (tokens, k); also all scores if asked for."""
        scores = self.scores(x)
        weights, experts = scores.topk(self.top_k, -1)
        experts = self.without_padding(experts)
        return (weights, experts, scores) if return_all_scores else (weights, experts)

    def without_padding(self, experts: Tensor) -> Tensor:
        """Choices with -1 for padding."""
        valid = self.batch.valid
        return experts if valid is None else experts.masked_fill(~valid[:, None], -1)

    def limited(
        self, experts: Tensor, weights: Tensor, table: Tensor, capacity: Tensor, policy: str = "position"
    ) -> Tensor:
        """Choices with -1 for those beyond what an expert takes. ``table``: (ranks, experts), chosen on each rank."""
        if policy == "probability":
            return most_probable(experts, weights, self.batch, table.sum(0), capacity)
        me = self.batch.index()
        return within_capacity(experts, table[me], table[:me].sum(0), capacity)


def check_capacity(capacity: Any, call: str) -> None:
    """Refuse numbers of which every token would be dropped."""
    for value in capacity if isinstance(capacity, tuple | list) else (capacity,):
        if not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
            raise FleetError(
                f"{call}: capacity is {capacity!r}; an expert that takes {value!r} times the tokens takes none: want positive "
                "numbers, or None for TopKGate, which then drops nothing"
            )


def _capacity(rate: float, tokens: Tensor) -> Tensor:
    return torch.ceil(rate * tokens.double()).long()


class SwitchGate(NaiveGate):
    """One expert for each token, by softmax, with a capacity and the loss of Switch Transformers.

    Args:
        switch_eps: while training, numbers of [1 - eps, 1 + eps) are added to the scores.
        capacity: an expert takes so many times the tokens of the whole batch, while training and else; those that come
            later are dropped.

    Source: ``paddle.incubate.distributed.models.moe.SwitchGate``; Fedus et al. (2021).
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int = 1,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        group: Ranks | None = None,
    ) -> None:
        if topk != 1:
            raise FleetError(f"SwitchGate: topk is {topk}; a token goes to 1 expert here. TopKGate takes any number")
        super().__init__(d_model, num_expert, world_size, 1, group)
        check_capacity(capacity, "SwitchGate")
        self.switch_eps, self.capacity = switch_eps, capacity

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """(tokens, d_model) -> weights and experts, (tokens, 1)."""
        scores = self.scores(x)
        if self.training and self.switch_eps:
            scores = scores + (self.batch.uniform(x, self.tot_expert) * (2 * self.switch_eps) + 1 - self.switch_eps)
        probabilities = scores.softmax(-1)
        weights, experts = probabilities.topk(1, -1)
        experts = self.without_padding(experts)
        table = self.batch.table(torch.cat([chosen(experts, self.tot_expert), self.batch.count(x)[None]]))
        self.chosen = table[:, :-1].sum(0)
        rate = self.capacity[0 if self.training else 1]
        capacity = _capacity(rate, table[:, -1].sum())
        experts = self.limited(experts, weights, table[:, :-1], capacity)
        kept = self.chosen.clamp_max(capacity)
        total = kept.sum().clamp_min(1)
        probability = self.batch.sum(self.batch.of_valid(probabilities).sum(0)) / total
        self.set_loss((kept / total * probability).sum() * self.tot_expert)
        return weights, experts


class GShardGate(NaiveGate):
    """Two experts for each token, with a capacity, random second choices, and the loss of GShard.

    Args:
        capacity: as of ``SwitchGate``.
        random_routing: a second choice is dropped where twice its weight is below a random number of [0, 1).

    Source: ``paddle.incubate.distributed.models.moe.GShardGate``; Lepikhin et al. (2020).
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int = 1,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        group: Ranks | None = None,
    ) -> None:
        if topk != 2:
            raise FleetError(f"GShardGate: topk is {topk}; a token goes to 2 experts here. TopKGate takes any number")
        super().__init__(d_model, num_expert, world_size, 2, group)
        check_capacity(capacity, "GShardGate")
        self.capacity, self.random_routing = capacity, random_routing

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """(tokens, d_model) -> weights and experts, (tokens, 2)."""
        weights, experts, scores = super().forward(x, return_all_scores=True)
        table = self.batch.table(torch.cat([chosen(experts, self.tot_expert), self.batch.count(x)[None]]))
        self.chosen, tokens = table[:, :-1].sum(0), table[:, -1].sum()
        mean = self.batch.sum(self.batch.of_valid(scores.softmax(-1)).sum(0)) / tokens.clamp_min(1)
        self.set_loss((self.chosen / tokens.clamp_min(1) * mean).mean() * self.tot_expert**2)
        capacity = _capacity(self.capacity[0 if self.training else 1], tokens)
        experts = self.limited(experts, weights, table[:, :-1], capacity)
        if self.random_routing:
            second = 2 * weights[:, 1] < self.batch.uniform(x, 1)[:, 0]
            experts = torch.stack([experts[:, 0], experts[:, 1].masked_fill(second, -1)], 1)
        return weights, experts
