"""Eight programs of one card, of a size that is wanted: what plans are found for, and trained under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cut_programs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, vocab: int, time: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class MLP(nn.Module):
    """Seed 003's network."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Linear(width, middle, bias=False), nn.Linear(middle, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w1(F.relu(self.w0(x)))


class GRU(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = (
            nn.Embedding(vocab, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, vocab),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(x))[0])


@dataclass(frozen=True)
class Program:
    """A model, an example of its batch, and its loss of (model, *batch)."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    statistics: bool = False
    """Of batches: Adam makes their rounding a matter of steps, so that it trains with SGD."""


def _text(rows: int, time: int, vocab: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(vocab, (rows, time)), torch.randint(vocab, (rows, time)))


def _pair(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randn(*shape)


def _tokens(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _plain(name: str) -> Callable[[], nn.Module]:
    """A model of the pipelines' tests without dropout, whose numbers a plain program draws otherwise."""

    def build() -> nn.Module:
        model = cut_programs.MODELS[name][0]()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        return model

    return build


def small() -> dict[str, Program]:
    """All eight, of a size that trains in milliseconds."""
    rest = {
        name: Program(
            _plain(name), cut_programs.MODELS[name][1], cut_programs.MODELS[name][2], name in ("resnet", "unet")
        )
        for name in ("resnet", "unet", "t5", "vit")
    }
    return {
        "gpt wide": Program(lambda: GPT(32, 2, 24, 6), _text(8, 6, 24), _tokens),
        "gpt deep": Program(lambda: GPT(16, 6, 24, 6), _text(8, 6, 24), _tokens),
        "mlp": Program(lambda: MLP(16, 64), lambda: _pair(8, 16), lambda m, x, y: F.mse_loss(m(x), y)),
        "gru": Program(lambda: GRU(24, 16), _text(8, 6, 24), _tokens),
        **rest,
    }  # fmt: skip


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """The program's optimizer."""
    if program.statistics:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def step_of(program: Program) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
    """A program's model, its optimizer, and its step as ``to_static`` takes it."""
    torch.manual_seed(0)
    model = program.build().train()
    optimizer = optimizer_of(program, model)

    def step(*batch: Tensor) -> Tensor:
        loss = program.loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step
