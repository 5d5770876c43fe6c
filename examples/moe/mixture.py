"""A small mixture of experts for one card, in plain PyTorch: bytes in, bytes out. Nothing here knows of parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Each token goes to the ``k`` experts that a router finds most probable; (batch, time, width) -> the same.

    Attributes:
        up, down: the experts' weights, stacked: (experts, width, hidden) and (experts, hidden, width).
        loss: of the last forward, 1 where the experts are chosen alike; ``share``: (experts,), of all choices.
    """

    loss: Tensor
    share: Tensor

    def __init__(self, width: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.k, self.experts = k, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        flat = chosen.flatten()
        counts = F.one_hot(flat, self.experts).sum(0)
        self._balance(probabilities, counts / len(flat))
        order = flat.argsort(stable=True)  # choices in the order of their experts
        ends = counts.cumsum(0).int()
        rows = tokens[order // self.k]
        rows = F.grouped_mm(F.gelu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)
        rows = (rows * weights[order, None])[order.argsort()]  # and back
        return rows.view(-1, self.k, x.shape[-1]).sum(1).view(x.shape)

    def _balance(self, probabilities: Tensor, share: Tensor) -> None:
        """Shazeer et al., as Switch Transformers have it."""
        self.loss, self.share = self.experts * (share * probabilities.mean(0)).sum(), share.detach()


class Block(nn.Module):
    """A pre-norm block with a mixture in the place of its MLP."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.attention, self.mixture = Attention(width, heads), Mixture(width, hidden, experts, k)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mixture(self.second(x))


class Model(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) scores of the next one."""

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        hidden: int = 128,
        experts: int = 8,
        k: int = 2,
        time: int = 64,
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, experts, k) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def mixtures(self) -> list[Mixture]:
        """Those of all blocks."""
        return [block.mixture for block in self.blocks]
