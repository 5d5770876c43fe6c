"""Habits of training programs: each written once, run on one card and on two ranks, with equal numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from twins import MESH

import onecard as oc
from onecard.testing import multirank

VOCABULARY, TIME = 17, 8


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.attention, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.size()
        parts = self.attention(self.first(x)).split(width, dim=2)
        q, k, v = (p.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .contiguous()
            .view(batch, time, width)
        )
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TIME, width)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.table.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Place = Callable[[Tensor], Tensor]


def ids(step: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (5, TIME), generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    logits = net(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), x.view(-1), ignore_index=-1)


def train(net: nn.Module, place: Place, steps: int = 2, loss: Any = loss_of) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        value = loss(net, place(ids(step)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def recompute(net: Any, place: Place, **how: Any) -> list[float]:
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, **how)
    return train(net, place)


def selective(net: Any, place: Place) -> list[float]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return recompute(net, place, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


def decay_groups(net: Any, place: Place) -> list[float]:
    """As in nanoGPT: decay of matrices only, warm-up by hand, accumulation, GradScaler, clipping."""
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 3
        for micro in range(2):
            loss = loss_of(net, place(ids(2 * step + micro))) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), float(nn.utils.clip_grad_norm_(parameters, 1.0))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen


def closures(net: Any, place: Place) -> list[float]:
    """As in Lightning: the loss comes from the optimizer's closure, and is kept as a tensor."""
    optimizer, kept = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, place(ids(step)))
            loss.backward()
            return loss

        kept.append(optimizer.step(closure).detach())
    return [float(v) for v in torch.stack(kept)] + torch.tensor([v.item() for v in kept]).tolist()


def running_totals(net: Any, place: Place) -> list[float]:
    """As in the Trainer of transformers: sums of detached losses, predictions as arrays."""
    total, seen = torch.zeros(()), 0
    for step in range(3):
        x = place(ids(step))
        loss = loss_of(net, x)
        total += loss.detach() * len(x)
        seen += len(x)
    with torch.no_grad():
        guessed = net(place(ids())).argmax(-1)
    return [(total / seen).item(), float(guessed.cpu().numpy().sum()), (guessed == place(ids())).float().mean().item()]


def averages(net: Any, place: Place) -> list[float]:
    """EMA in a dict of tensors, loaded at the end; and a copy of the model that trains on alone."""
    other = copy.deepcopy(net)
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    losses = train(net, place)
    for name, p in net.named_parameters():
        shadow[name] = 0.9 * shadow[name] + 0.1 * p.detach()
    net.load_state_dict(shadow, strict=False)
    return losses + train(other, place) + train(net, place)


def logged(net: Any, place: Place) -> list[float]:
    """What boards of figures ask for: norms by hand, quantiles, histograms, hooks."""
    seen: list[float] = []
    for p in net.parameters():
        p.register_hook(lambda g: seen.append(g.norm().item()))
    train(net, place, 1)
    norms = [p.grad.data.norm(2).item() ** 2 for p in net.parameters()]
    weight = net.table.weight.detach()
    return [
        *sorted(seen),
        sum(norms) ** 0.5,
        weight.std().item(),
        weight.quantile(0.5).item(),
        float(weight.numpy().max()),
    ]


def penalties(net: Any, place: Place) -> list[float]:
    def loss(net: Any, x: Tensor) -> Tensor:
        squares = sum(p.pow(2).sum() for p in net.parameters())
        return loss_of(net, x) + 1e-3 * squares + 1e-4 * torch.cat([p.flatten() for p in net.parameters()]).abs().sum()

    return train(net, place, loss=loss)


def adapters(net: Any, place: Place) -> list[float]:
    """LoRA by hooks, with parameters that are plain: they are added after the model was laid out."""
    for block in net.blocks:
        block.A, block.B = nn.Parameter(torch.full((2, 16), 0.1)), nn.Parameter(torch.full((64, 2), 0.01))
        block.up.register_forward_hook(lambda _, x, y, block=block: y + (x[0] @ block.A.T) @ block.B.T)
    return train(net, place)


def frozen(net: Any, place: Place) -> list[float]:
    for name, p in net.named_parameters():
        p.requires_grad_("blocks.1" in name)
    optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=0.1)
    net.norm.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.norm.parameters()), "lr": 0.01})
    losses = []
    for step in range(3):
        loss = loss_of(net, place(ids(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


HABITS = [
    partial(recompute, use_reentrant=False), partial(recompute, use_reentrant=True), selective, decay_groups, closures,
    running_totals, averages, logged, penalties, adapters, frozen,
]  # fmt: skip


@pytest.mark.proof
@multirank(2)
def test_habits() -> None:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    for habit in HABITS:
        found = []
        for divided in (False, True):
            torch.manual_seed(0)
            net = GPT()
            place: Place = (lambda x: oc.shard_tensor(x, MESH, [oc.Shard(0)])) if divided else (lambda x: x)
            found.append(habit(oc.shard_layer(net, MESH) if divided else net, place))
        assert len(found[0]) > 1 and found[1] == pytest.approx(found[0], rel=2e-4, abs=1e-6), habit
