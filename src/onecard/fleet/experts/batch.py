"""What a router counts is counted over the whole batch: the tokens of all ranks that see others, without padding.

Numbers that a loss is made of are summed over those ranks, and their gradient is such that the mean over the ranks' losses,
which ``fleet`` takes, has the gradient of one card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.comm.issue import plain, trace
from onecard.comm.issue.ranks import Ranks
from onecard.tensor.random_operators.one_card import set_aside


@dataclass(frozen=True)
class Batch:
    """The tokens that a layer is given on all ranks together.

    Attributes:
        group: the ranks that have other tokens, in the order in which one card has these; None: this rank has all.
        losses: of how many ranks' losses the program's is the mean.
        valid: (tokens,) bool, of this rank: those that are no padding; None: all.
    """

    group: Ranks | None = None
    losses: int = 1
    valid: Tensor | None = None

    def is_alone(self) -> bool:
        """Whether no other rank has tokens."""
        return self.group is None or self.group.size == 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have; differentiable."""
        return x if self.is_alone() else _WholeSum.apply(x, self.group, self.losses)

    def table(self, mine: Tensor) -> Tensor:
        """(ranks, n) from each rank's (n,) numbers."""
        if self.group is None or self.is_alone():
            return mine[None]
        return plain.all_gather(mine[None], self.group, 0, call="tokens of experts")

    def index(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None or self.is_alone() else self.group.index

    def count(self, x: Tensor) -> Tensor:
        """How many tokens of this rank count; a 0-dim int64 tensor."""
        if self.valid is None:
            return torch.full((), x.shape[0], dtype=torch.int64, device=x.device)
        return self.valid.sum()

    def uniform(self, x: Tensor, width: int) -> Tensor:
        """Random numbers of [0, 1) for this rank's tokens, (tokens, width): those that one card draws for the whole batch."""
        table = self.table(torch.tensor([x.shape[0]], device=x.device)).flatten()
        without = table.is_meta or trace.faking()
        lengths = [x.shape[0]] * len(table) if without else [int(n) for n in table.tolist()]
        out = torch.empty(x.shape[0], width, dtype=torch.float32, device=x.device)
        with set_aside():
            law, key = random.law("uniform_", torch.float32), random.new_key()
            random.fill(out, law, key, [sum(lengths), width], [sum(lengths[: self.index()]), 0])
        return out

    def of_valid(self, x: Tensor) -> Tensor:
        """Per-token numbers with zeros for padding."""
        return x if self.valid is None else x.masked_fill(~self.valid.view(-1, *[1] * (x.dim() - 1)), 0)


class _WholeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks, losses: int) -> Tensor:
        ctx.given = (group, losses)
        return plain.all_reduce(x, group, call="router loss")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.given[1], None, None


def chosen(indices: Tensor, experts: int) -> Tensor:
    """(experts,) int64: how often each is chosen; -1 is none."""
    hits = torch.zeros(experts + 1, dtype=torch.int64, device=indices.device)
    flat = indices.reshape(-1) + 1
    return hits.scatter_add_(0, flat, torch.ones_like(flat))[1:]


def within_capacity(indices: Tensor, counts: Tensor, before: Tensor, capacity: Tensor) -> Tensor:
    """Choices with -1 for those that come too late: an expert takes ``capacity`` tokens of the whole batch, in their order.

    Args:
        indices: (tokens, k), of this rank.
        counts: (experts,): how often each is chosen on this rank; ``before``: on the ranks before this one.

    Example:
        >>> within_capacity(torch.tensor([[0], [0], [1]]), torch.tensor([2, 1]), torch.tensor([1, 0]), torch.tensor(2)).tolist()
        [[0], [-1], [1]]
    """
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    first = counts.cumsum(0) - counts
    sorted_to = flat[order]
    place = torch.arange(flat.numel(), device=flat.device) - (flat < 0).sum() - first[sorted_to.clamp_min(0)]
    late = place + before[sorted_to.clamp_min(0)] >= capacity
    kept = torch.where(late, -1, sorted_to)
    return torch.empty_like(flat).scatter_(0, order, kept).view(indices.shape)


def most_probable(indices: Tensor, weights: Tensor, batch: Batch, counts: Tensor, capacity: Tensor) -> Tensor:
    """The same, but an expert takes the tokens with the largest weights; of equal ones the first.

    Every rank learns the choices and weights of all: (tokens, k) numbers of each travel.
    """
    flat, value = indices.reshape(-1), weights.detach().reshape(-1)
    if not batch.is_alone():
        assert batch.group is not None
        lengths = batch.table(torch.tensor([flat.numel()], device=flat.device)).flatten().tolist()
        flat = plain.all_gather(flat, batch.group, 0, lengths, call="choices of tokens")
        value = plain.all_gather(value, batch.group, 0, lengths, call="weights of tokens")
        begin = sum(lengths[: batch.index()])
    else:
        begin = 0
    order = value.argsort(descending=True, stable=True)
    kept = within_capacity(flat[order], counts, torch.zeros_like(counts), capacity)
    whole = torch.empty_like(flat).scatter_(0, order, kept)
    return whole[begin : begin + indices.numel()].view(indices.shape)
