"""A byte-level GPT for one card, in plain PyTorch. Nothing here knows of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `d_model` must be a multiple of `n_head`."""

    vocab_size: int = 256
    max_seq_len: int = 128
    n_layer: int = 2
    n_head: int = 4
    d_model: int = 224
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model {self.d_model} does not split into n_head {self.n_head} equal heads; "
                f"take d_model {self.n_head * max(1, round(self.d_model / self.n_head))}"
            )


class Attention(nn.Module):
    """Causal self-attention, (batch, time, d_model) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        self.dropout = config.dropout
        # Three matrices, not one: their rows are then ordered by head, and so divide by head.
        self.q = nn.Linear(d, d)
        # A key bias adds the same to all scores of a query and softmax cancels it: its gradient is only round-off.
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, time, d_model) -> (batch, head, time, d_head)."""
        batch, time, width = x.shape
        return x.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2)


class MLP(nn.Module):
    """Two linear maps around a GELU, (..., d_model) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.d_model, 4 * config.d_model)
        self.proj = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """GPT-2 in small: (batch, time) int64 token ids -> (batch, time, vocab_size) logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))

    def _initialise(self) -> None:
        """GPT-2: normal(0, 0.02), and what enters the residual stream less by the root of its 2 n_layer terms."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if into_residual else 0.02
                nn.init.normal_(parameter, std=std)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte; logits (batch, time, vocab), targets (batch, time) int64."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: GPT, prompt: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continue `prompt` (batch, time) int64 by `n` tokens -> (batch, time + n); temperature 0 takes the likeliest."""
    was_training = model.training
    model.eval()
    ids = prompt
    for _ in range(n):
        logits = model(ids[:, -model.config.max_seq_len :])[:, -1]
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, following], dim=1)
    model.train(was_training)
    return ids
