"""Models that nobody prepared for a pipeline, with their batches and losses: skips, statistics, shared weights, two towers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from amounts import amount
from torch import Tensor, nn

import onecard as oc

K = 4
ATT = 0.1
"""Microbatches."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=ATT if self.training else 0.0)
        return x + self.drop(F.gelu(self.out(y.transpose(1, 2).flatten(2))))


class GPT(nn.Module):
    """A tied embedding, positions, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(10, 8), nn.Parameter(torch.randn(3, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(amount(2, 4)))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class ResNet(nn.Module):
    """Batch norm, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        for i in range(0, 6, 2):
            y = self.norms[i + 1](self.convs[i + 1](self.relu(self.norms[i](self.convs[i](x)))))
            y += x
            x = self.relu(y)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Values of early stages that late ones need, the input among them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, stride=2)])
        self.middle, self.norm = nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.GroupNorm(2, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(32, 8, 2, stride=2)])
        self.out = nn.Conv2d(8 + 8 + 3, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down[0](x))
        b = F.silu(self.down[1](a))
        c = self.norm(F.silu(self.middle(b)))
        u = torch.cat([self.up[0](c), b], 1)
        return self.out(torch.cat([self.up[1](u), a, x], 1))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.1, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, use_cache=False))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=10))


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (8, 3)), torch.randint(10, (8, 3))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 8, 8), torch.randint(10, (8,))


def _token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


Row = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor]]
MODELS: dict[str, Row] = {
    "gpt": (GPT, _tokens, _token_loss),
    "resnet": (ResNet, _images, _class_loss),
    "unet": (UNet, lambda: (torch.randn(8, 3, 8, 8), torch.randn(8, 1, 8, 8)), lambda m, x, y: F.mse_loss(m(x), y)),
    "t5": (
        t5,
        lambda: (torch.randint(1, 20, (8, 5)), torch.randint(1, 20, (8, 4))),
        lambda m, x, y: m(input_ids=x, labels=y).loss,
    ),
    "llama": (llama, lambda: (torch.randint(20, (8, 5)),) * 2, lambda m, x, y: m(input_ids=x, labels=y).loss),
    "vit": (vit, _images, lambda m, x, y: m(pixel_values=x, labels=y).loss),
}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    # Statistics of few rows make Adam's steps a matter of rounding.
    if name in ("resnet", "unet"):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


MARKS: dict[str, dict[str, int]] = {
    "gpt": {r".*\.qkv\.(weight|bias)": 0, r".*\.out\.weight": 1},
    "resnet": {r"(convs|norms)\.[024]\..*": 0, r"convs\.[135]\.weight": 1},
    # What down.0 makes is read along a skip, too, where it meets whole channels. A transposed weight is (in, out, ...).
    "unet": {r"(down\.0|middle|norm)\..*": 0, r"down\.1\.weight": 1, r"up\.0\.weight": 0},
    "t5": {r".*\.(q|k|v|wi)\.weight": 0, r".*\.(o|wo)\.weight": 1},
    "llama": {r".*\.(q|k|v|gate|up)_proj\.weight": 0, r".*\.(o|down)_proj\.weight": 1},
    "vit": {r".*\.([qkv]_proj|fc1)\.(weight|bias)": 0, r".*\.(o_proj|fc2)\.weight": 1},
}
"""The dims along which tp cuts: features or channels that one layer makes, and the next one reads."""


def lay_out(name: str, model: nn.Module, mesh: oc.ProcessMesh) -> None:
    """On ("pp", "dp") whole; on ("pp", "tp") by the marks."""

    def place(path: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        for kept in (layer._parameters, layer._buffers):
            for short, t in list(kept.items()):
                dims = [dim for mark, dim in MARKS[name].items() if re.fullmatch(mark, f"{path}.{short}".lstrip("."))]
                if dims and t is not None and t.dim():
                    setattr(layer, short, oc.shard_tensor(t, mesh, [oc.Replicate(), oc.Shard(dims[0])]))

    oc.shard_layer(model, mesh, place if "tp" in mesh.dim_names else None)


def trained(
    name: str, stages: Any = None, steps: int = 5, mesh: oc.ProcessMesh | None = None, rows_of: int = 1
) -> tuple[list[list[float]], nn.Module, Any]:
    """Losses and norms of gradients; by ``stages``, or on one card: batch norm takes a microbatch after the other there, too.

    Args:
        mesh: of axes "pp" and one more, on which the pipeline's tensors lie.
        rows_of: over how many ranks dp cuts the batch that one card is compared with: a microbatch has some rows of each.
    """
    build, batch, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    if mesh is not None:
        lay_out(name, model, mesh)
    optimizer = optimizer_of(name, model)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer)

    def finish() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss.detach(), finish()

    def on_one_card(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(())
        parts = [torch.cat([p.view(K, -1, *p.shape[1:]) for p in t.chunk(rows_of)], 1) for t in (x, y)]
        for part in zip(*parts, strict=True):
            loss = loss_of(model, *part) / K
            loss.backward()
            total += loss.detach()
        return total, finish()

    normalizes = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    alone = on_one_card if normalizes else step
    run = alone if stages is None else oc.to_static(step, stages=stages)
    found = []
    for i in range(steps):
        torch.manual_seed(i)
        given = batch()
        if mesh is not None:
            rows = oc.Shard(0) if "dp" in mesh.dim_names else oc.Replicate()
            given = tuple(oc.shard_tensor(t, mesh, [oc.Replicate(), rows]) for t in given)
        with oc.one_card_random() if stages is None else nullcontext(), warnings.catch_warnings():
            # The program on one card is the loop of microbatches, batch norm's statistics as well.
            warnings.filterwarnings("ignore", ".*batch norm at .* normalizes each microbatch")
            found.append([float(v) for v in run(*given)])
    return found, model, run
