"""What the tests of the pipeline runtime share: a small GPT as layers, with a tied embedding, and its one-card twin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fleet_programs import close, part_of
from torch import Tensor, nn

from onecard import fleet

VOCABULARY, WIDTH, TIME = 11, 8, 4


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def head(layer: Embed, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.gelu(self.out(y))


def gpt(blocks: int) -> list[Any]:
    return [
        fleet.SharedLayerDesc("embedding", Embed),
        *(fleet.LayerDesc(Block) for _ in range(blocks)),
        fleet.LayerDesc(nn.LayerNorm, WIDTH),
        fleet.SharedLayerDesc("embedding", Embed, head),
    ]


class OneCard(nn.Sequential):
    """The same model on one card, by the same list: names and random numbers as of ``nn.Sequential``."""

    def __init__(self, descs: list[Any]) -> None:
        made: dict[str, nn.Module] = {}
        layers, self_functions = [], []
        for desc in descs:
            key = getattr(desc, "key", None)
            if key is None:
                layer = desc.build_layer() if isinstance(desc, fleet.LayerDesc) else desc
            else:
                layer = made[key] = made[key] if key in made else desc.build_layer()
            layers.append(layer)
            self_functions.append(getattr(desc, "forward_func", None))
        super().__init__(*layers)
        self.functions = self_functions

    def forward(self, x: Any) -> Any:
        for layer, function in zip(self, self.functions, strict=True):
            x = layer(x) if function is None else function(layer, x)
        return x


def compare(mine: nn.Module, single: nn.Module, what: str = "", gradients: bool = False) -> None:
    """This rank's parameters (or their gradients) against those of the one-card model."""
    theirs = dict(single.named_parameters(remove_duplicate=False))
    count = 0
    for name, p in mine.named_parameters():
        if gradients:
            close(p.grad, part_of(p, theirs[name].grad), f"{what}: gradient of {name}")
        close(p.detach(), part_of(p, theirs[name].detach()), f"{what}: {name}")
        count += 1
    assert count


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (batch, TIME + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].contiguous()


def begin(mode: Any = "1F1B", microbatches: int = 4, size: int = 2, **degrees: int) -> fleet.HybridCommunicateGroup:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": microbatches, "micro_batch_size": size, "schedule_mode": mode}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()
