"""Habits of training programs with a mixture whose experts are cut along "ep": each written once, beside one card."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_programs import grouped, grouped_added
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks

WORDS, WIDTH, INNER, TOKENS = 12, 16, 12, 10
EPS = 1e-3  # well above the rounding of a gradient, of which AdamW would else make steps
Place = Callable[[Tensor], Tensor]


class Mixture(nn.Module):
    """An embedding, a mixture, and a head that is tied to the embedding."""

    def __init__(self, experts: int, top: int = 2) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.router = nn.Parameter(torch.randn(experts, WIDTH) * 0.4)
        self.up = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, INNER) * 0.4)
        self.top, self.layer = min(top, experts), grouped

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.layer(x, self.router, self.up, self.down, self.top))


def ids(step: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(WORDS, (tokens,), generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, x: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(net(x), x, **how)


def train(net: nn.Module, place: Place, steps: int = 2, edit: Any = None, tokens: int = TOKENS) -> list[Any]:
    optimizer, seen = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=EPS), []
    for step in range(steps):
        loss = loss_of(net, place(ids(step, tokens)))
        loss.backward()
        if edit is not None:
            edit(net)
        seen += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def frozen_router(net: Any, place: Place) -> list[Any]:
    net.router.requires_grad_(False)
    return train(net, place)


def frozen_experts(net: Any, place: Place) -> list[Any]:
    net.up.requires_grad_(False)
    net.down.requires_grad_(False)
    return train(net, place)


def unused_experts(net: Any, place: Place) -> list[Any]:
    """The last experts have no token: their gradient is zero, decay goes on."""
    with torch.no_grad():
        net.router.zero_()
        net.router[0, 0], net.router[1, 1] = 9.0, 9.0
        net.table.weight.abs_().add_(0.5)
    return train(net, place)


def one_expert(net: Any, place: Place) -> list[Any]:
    """All tokens go to the last one."""
    net.top = 1
    with torch.no_grad():
        net.router.zero_()
        net.router[-1] = 5.0
        net.table.weight.abs_()
    return train(net, place)


def hooks(net: Any, place: Place) -> list[Any]:
    seen: list[Any] = []
    net.up.register_hook(lambda g: 2 * g)
    net.down.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    net.register_forward_hook(lambda _, x, y: y * 0.5)
    return train(net, place) + seen


def averages(net: Any, place: Place) -> list[Any]:
    other, shadow = copy.deepcopy(net), {n: p.detach().clone() for n, p in net.named_parameters()}
    seen = train(net, place)
    for name, p in net.named_parameters():
        shadow[name].lerp_(p.detach(), 0.3)
    net.load_state_dict(shadow, strict=False)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    seen += train(net, place)
    ema.update_parameters(net)
    return [*seen, *train(other, place), loss_of(ema, place(ids(5))).detach(), ema.module.up.detach()]


def scaled(net: Any, place: Place) -> list[Any]:
    """Accumulation, GradScaler and clipping."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=EPS)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(2):
        for micro in range(2):
            scaler.scale(loss_of(net, place(ids(2 * step + micro))) / 2).backward()
        scaler.unscale_(optimizer)
        seen += [nn.utils.clip_grad_norm_(net.parameters(), 0.1), *(p.grad.clone() for p in net.parameters())]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def edited(net: Any, place: Place) -> list[Any]:
    def edit(net: Any) -> None:
        net.up.grad.mul_(0.5)
        net.down.grad = net.down.grad.clamp(-0.01, 0.01) + 0.1 * net.down.detach()
        net.router.grad[0] = 0.0

    return train(net, place, edit=edit)


def ignored(net: Any, place: Place) -> list[Any]:
    x = ids(0)
    labels = x.masked_fill(torch.arange(len(x)) < 6, -100)  # all but two of them on the last rank
    loss = F.cross_entropy(net(place(x)), place(labels))
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


def one_token(net: Any, place: Place) -> list[Any]:
    return train(net, place, tokens=1)


def no_token(net: Any, place: Place) -> list[Any]:
    net.layer = grouped_added
    loss = loss_of(net, place(ids(0, 0)), reduction="sum")
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


HABITS = [
    train, frozen_router, frozen_experts, unused_experts, one_expert, hooks, averages, scaled, edited, ignored, one_token,
    no_token,
]  # fmt: skip
UNEVEN = [train, unused_experts, one_expert, scaled]


def differences(experts: int, habits: list[Any]) -> list[str]:
    """On a rank: what differs from one card."""
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # bincount: a few integers
    ranks, wrong = oc.get_world_size(), []
    mesh = oc.ProcessMesh(range(ranks), ["ep"])
    for habit in habits:
        found = []
        for cut in (False, True):
            torch.manual_seed(0)
            net: Any = Mixture(experts)
            if cut:
                for name in ("up", "down"):
                    setattr(net, name, oc.shard_tensor(getattr(net, name), mesh, [oc.Shard(0)]))
                oc.shard_layer(net, mesh)
            place: Place = (lambda x: oc.shard_tensor(x, mesh, [oc.Shard(0)])) if cut else (lambda x: x)
            try:
                values = [*habit(net, place), *(p.detach() for p in net.parameters())]
            except Exception as fault:
                values = [f"{type(fault).__name__}: {fault}"]
            found.append([oc.unshard(x) if isinstance(x, oc.DistTensor) else x for x in values])
        wrong += [f"{habit.__name__}, {experts} experts: {text}" for text in _unlike(*found)]
    return wrong


def _unlike(wanted: list[Any], made: list[Any]) -> list[str]:
    texts = [x for x in wanted + made if isinstance(x, str)]
    if texts or len(wanted) != len(made):
        return texts or ["other results"]
    pairs = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(wanted, made, strict=True)]
    scaled = [(float((a - b).abs().max()), float(a.abs().max())) for a, b in pairs if a.numel()]
    return [f"{e:.3g} of {s:.3g}" for e, s in scaled if not e <= 1e-5 * s + 1e-7]


@pytest.mark.proof
@pytest.mark.parametrize(("experts", "habits"), [(6, HABITS), (5, UNEVEN), (1, UNEVEN[:1])])
def test_habits(experts, habits):
    for wrong in run_ranks(differences, 2, experts, habits):
        assert wrong == []


def told() -> list[str]:
    """What is said of a router that names an expert that is not there; on one card, and where experts are cut."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["ep"])
    found = []
    for cut in (False, True):
        up, x, number = torch.ones(4, 3, 3), torch.ones(2, 3), torch.tensor([0, 4])
        if cut:
            up, x, number = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (up, x, number))
        try:
            torch.bmm(up[number], x[:, :, None])
        except (IndexError, RuntimeError) as fault:
            found.append(str(fault))
    return found


def test_an_expert_that_is_not_there_is_told():
    for one, other in run_ranks(told, 2):
        assert "out of" in one and "out of" in other
