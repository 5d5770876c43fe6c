"""TopKGate: the routers of Mixtral, Qwen-MoE, DeepSeek and their kin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.experts.batch import chosen
from onecard.fleet.experts.gates import POLICIES, NaiveGate, check_capacity

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


class TopKGate(NaiveGate):
    """The k most probable experts, with every choice that today's mixtures make.

    Args:
        score: "softmax" of all scores (Mixtral, Qwen), "sigmoid" of each (DeepSeek-V3, Llama-4), or "softmax_of_chosen",
            after the choice.
        normalize: whether the weights of a token are divided by their sum.
        scale: what the weights are multiplied with (``routed_scaling_factor``).
        linear_bias: whether the scores have a bias.
        groups, top_groups: experts lie in so many groups, and a token goes to experts of its best groups alone (by the sum
            of a group's two best).
        bias_rate: a bias steers choices, not weights: ``update_bias`` moves it by so much towards experts that were chosen
            too rarely; 0: there is none.
        balance_loss: what the loss experts x sum(share of choices x mean probability) is multiplied with.
        z_loss: the same of the mean squared logsumexp of the scores.
        jitter: while training, tokens are multiplied with random numbers of [1 - jitter, 1 + jitter) for the scores.
        capacity: an expert takes capacity x tokens x k / experts tokens of the whole batch; None: nothing is dropped.
        drop_policy: which it takes: the first ("position"), or those of largest weight ("probability").

    Source: Zoph et al., ST-MoE (2022); DeepSeek-AI, DeepSeek-V3 (2024), for the bias; Megatron-LM's ``TopKRouter``.

    Example:
        >>> gate = TopKGate(4, 8, topk=2, score="sigmoid", bias_rate=0.001, groups=2, top_groups=1)
        >>> weights, experts = gate(torch.randn(5, 4))
        >>> bool((experts[:, 0] // 4 == experts[:, 1] // 4).all())
        True
    """

    bias: Tensor | None
    since: Tensor

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int = 1,
        topk: int = 2,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        linear_bias: bool = False,
        groups: int = 1,
        top_groups: int | None = None,
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        capacity: float | None = None,
        drop_policy: str = "position",
        group: Ranks | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, topk, group, device, dtype)
        if not linear_bias:
            self.gate.register_parameter("bias", None)
        if capacity is not None:
            check_capacity(capacity, "TopKGate")
        self.score, self.normalize, self.scale = score, normalize, scale
        self.groups, self.top_groups = groups, groups if top_groups is None else top_groups
        self.bias_rate, self.balance_loss, self.z_loss = bias_rate, balance_loss, z_loss
        self.jitter, self.capacity, self.drop_policy = jitter, capacity, drop_policy
        self._check()
        self.register_buffer("bias", torch.zeros(self.tot_expert) if bias_rate else None)
        self.register_buffer("since", torch.zeros(self.tot_expert) if bias_rate else None)

    def _check(self) -> None:
        experts = self.tot_expert
        if self.score not in SCORES or self.drop_policy not in POLICIES:
            raise FleetError(
                f"TopKGate: score is {self.score!r}, of {', '.join(SCORES)}; drop_policy {self.drop_policy!r}, of "
                f"{', '.join(POLICIES)}"
            )
        if experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise FleetError(
                f"TopKGate: {experts} experts in {self.groups} groups, {self.top_groups} of them for a token"
            )
        if self.top_k > experts // self.groups * self.top_groups:
            raise FleetError(
                f"TopKGate: topk {self.top_k} is more than the {experts // self.groups * self.top_groups} experts of "
                f"{self.top_groups} of {self.groups} groups"
            )

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """(tokens, d_model) -> weights and experts, (tokens, k)."""
        given = x
        if self.training and self.jitter:
            noise = self.batch.uniform(x, x.shape[1]) * (2 * self.jitter) + 1 - self.jitter
            given = x.to(torch.promote_types(x.dtype, torch.float32)) * noise
        scores = self.scores(given)
        probabilities = scores.sigmoid() if self.score == "sigmoid" else scores.softmax(-1)
        experts = self.without_padding(self._choose(scores.detach(), probabilities.detach()))
        weights = self._weights(scores, probabilities, experts.clamp_min(0))
        if self._counts():
            self.chosen = None
            table = self.batch.table(torch.cat([chosen(experts, self.tot_expert), self.batch.count(x)[None]]))
            self._count(table[:, :-1].sum(0))
            self._lose(scores, probabilities, table[:, -1].sum())
            experts = self._drop(experts, weights, table[:, :-1], table[:, -1].sum())
        return weights, experts

    def _counts(self) -> bool:
        return bool(self.bias_rate or self.balance_loss or self.z_loss or self.capacity is not None)

    def _choose(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        by = scores if self.score == "softmax_of_chosen" else probabilities
        if self.bias is not None:
            by = by + self.bias.to(by.dtype)
        if self.top_groups < self.groups:
            grouped = by.unflatten(-1, (self.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(self.top_groups, -1).indices
            others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            by = grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)
        return by.topk(self.top_k, -1).indices

    def _weights(self, scores: Tensor, probabilities: Tensor, experts: Tensor) -> Tensor:
        if self.score == "softmax_of_chosen":
            return scores.gather(-1, experts).softmax(-1) * self.scale
        weights = probabilities.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.score == "sigmoid" else 0.0))
        return weights * self.scale

    def _count(self, counts: Tensor) -> None:
        self.chosen = counts
        if self.bias is not None and self.training and not _torch.in_backward():  # what is computed again was counted
            self.since.add_(counts)

    def _lose(self, scores: Tensor, probabilities: Tensor, tokens: Tensor) -> None:
        """The losses, multiplied with their coefficients, of the whole batch."""
        assert self.chosen is not None
        if not (self.balance_loss or self.z_loss):
            return
        if self.score == "sigmoid":
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        squares = scores.logsumexp(-1).square()[:, None]
        sums = self.batch.sum(self.batch.of_valid(torch.cat([probabilities, squares], 1)).sum(0)) / tokens.clamp_min(1)
        share = self.chosen / (tokens.clamp_min(1) * self.top_k)
        balance = (share * sums[:-1]).sum() * self.tot_expert
        self.set_loss(self.balance_loss * balance + self.z_loss * sums[-1])

    def _drop(self, experts: Tensor, weights: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
        if self.capacity is None:
            return experts
        capacity = torch.ceil(self.capacity * tokens.double() * self.top_k / self.tot_expert).long()
        return self.limited(experts, weights, table, capacity, self.drop_policy)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias by ``bias_rate`` for what was chosen since the last call, of all microbatches and ranks; no loss."""
        if self.bias is None:
            return
        self.bias.add_((self.since.mean() - self.since).sign(), alpha=self.bias_rate)
        self.since.zero_()
