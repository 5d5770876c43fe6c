"""Tokens to rows, one for each choice of an expert, and rows back to their tokens: the weighted sum of each token's rows.

Rows lie in the order of their experts. The way back reads each row once and writes each token once: no weighted copy of all
rows, and no zeros to which they are added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = torch.autograd.Function


class Choices:
    """Which token, and which of its choices, each row is.

    Attributes:
        order: (rows,) int64: choice ``order[i] % k`` of token ``order[i] // k`` is row i; what reaches no expert is not there.
        token: (rows,); ``tokens``: how many there are.
    """

    def __init__(self, order: Tensor, tokens: int, k: int) -> None:
        self.order, self.tokens, self.k = order, tokens, k
        self.token = order // k
        self.place, self.begin = self._bags()

    def _bags(self) -> tuple[Tensor, Tensor | None]:
        """Each token's rows: (tokens, k), or one after the other and where each token's begin."""
        rows = torch.arange(len(self.order), device=self.order.device)
        if len(self.order) == self.tokens * self.k:
            return torch.empty_like(self.order).scatter_(0, self.order, rows).view(self.tokens, self.k), None
        counts = torch.zeros(self.tokens + 1, dtype=torch.int64, device=self.order.device)
        counts.scatter_add_(0, self.token + 1, torch.ones_like(self.token))
        return self.order.argsort(), counts.cumsum(0)[:-1]

    def sums(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """(rows, width) -> (tokens, width): of each token the sum of its rows, which ``weights``, (tokens, k), multiply."""
        if weights is not None:
            weights = weights if self.begin is None else weights.reshape(-1)[self.order[self.place]]
        return F.embedding_bag(self.place, rows, self.begin, mode="sum", per_sample_weights=weights)


def to_rows(tokens: Tensor, choices: Choices) -> Tensor:
    """(tokens, width) -> (rows, width); differentiable.

    Example:
        >>> to_rows(torch.tensor([[1.0], [2.0]]), Choices(torch.tensor([0, 2, 1, 3]), 2, 2)).flatten().tolist()
        [1.0, 2.0, 1.0, 2.0]
    """
    return _Rows.apply(tokens, choices)


def to_tokens(rows: Tensor, weights: Tensor, choices: Choices) -> Tensor:
    """(rows, width) and (tokens, k) -> (tokens, width), of each token the weighted sum of its rows; differentiable.

    Example:
        >>> weights = torch.tensor([[1.0, 10.0], [1.0, 10.0]])
        >>> to_tokens(torch.arange(1.0, 5.0)[:, None], weights, Choices(torch.tensor([0, 2, 1, 3]), 2, 2)).flatten().tolist()
        [31.0, 42.0]
    """
    wide = torch.promote_types(rows.dtype, weights.dtype)
    return _Tokens.apply(rows.to(wide), weights.to(wide), choices)


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choices: Choices) -> Tensor:
        ctx.choices = choices
        return tokens.index_select(0, choices.token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Sums.apply(grads[0].contiguous(), ctx.choices), None


class _Sums(Function):
    """What ``_Rows`` gives back, and the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, choices: Choices) -> Tensor:
        ctx.choices = choices
        return choices.sums(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Rows.apply(grads[0], ctx.choices), None


class _Tokens(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choices: Choices) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.choices = choices
        return choices.sums(rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        choices: Choices = ctx.choices
        of_rows = weights.reshape(-1).index_select(0, choices.order)[:, None]
        grad = _Rows.apply(grads[0], choices)
        of_weights = None
        if ctx.needs_input_grad[1]:
            found = (grad * rows).sum(1)
            of_weights = found.new_zeros(weights.numel()).index_copy(0, choices.order, found).view(weights.shape)
        grad = grad * of_rows if torch.is_grad_enabled() else grad.mul_(of_rows)
        return grad, of_weights, None
