"""Counts over a batch that is divided over ranks: what is decided by their quotients is what one card decides, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onecard as oc
from onecard.testing import run_ranks


def _floats(chosen: Tensor, experts: int) -> Tensor:
    return F.one_hot(chosen, experts).float().sum((0, 1))


def _binned(chosen: Tensor, experts: int) -> Tensor:
    return torch.histc(chosen.flatten().float(), experts, 0, experts - 1)


def _scattered(chosen: Tensor, experts: int) -> Tensor:
    return torch.zeros(experts).scatter_add(0, chosen.flatten(), torch.ones(chosen.numel()))


FORMS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "capacity": lambda i, there, e: torch.ceil(there.sum() * 2 / e),
    "capacity with a factor": lambda i, there, e: torch.ceil(there.sum() * 1.1),
    "capacity by a tensor": lambda i, there, e: torch.ceil(there.sum() / torch.tensor(float(e))),
    "as a number": lambda i, there, e: torch.tensor(int(there.sum() * 2 / e)),
    "mean of counts": lambda i, there, e: torch.sign(_floats(i, e).mean() - _floats(i, e)),
    "mean of bins": lambda i, there, e: torch.sign(_binned(i, e).mean() - _binned(i, e)),
    "mean of what is scattered": lambda i, there, e: torch.sign(_scattered(i, e).mean() - _scattered(i, e)),
    "mean of whole numbers": lambda i, there, e: torch.sign(
        F.one_hot(i, e).sum((0, 1)).float().mean() - F.one_hot(i, e).sum((0, 1))
    ),
    "share": lambda i, there, e: (_binned(i, e) / _binned(i, e).sum() * e >= 1).float(),
    "share by a method": lambda i, there, e: _binned(i, e).div(i.numel()).mul(e).ge(1).float(),
    "share of a number": lambda i, there, e: (_floats(i, e) / i.numel() * e >= 1).float(),
    "without a graph": torch.no_grad()(lambda i, there, e: torch.ceil(_floats(i, e) / 3)),
    "step": lambda i, there, e: torch.heaviside(_floats(i, e) - _floats(i, e).mean(), torch.tensor(0.5)),
}


def _drawn(seed: int) -> tuple[Tensor, Tensor, int]:
    draw = torch.Generator().manual_seed(seed)
    experts = (3, 6, 12, 24, 48, 60, 7, 96, 160, 5)[seed % 10]
    tokens = experts * (2, 3, 1)[seed % 3]
    chosen = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(tokens)])
    return chosen, torch.rand(tokens, generator=draw) < 0.8, experts


def _differing(seeds: int) -> dict[str, list[int]]:
    warnings.simplefilter("ignore")
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    found: dict[str, list[int]] = {}
    for name, form in FORMS.items():
        for seed in range(seeds):
            chosen, there, experts = _drawn(seed)
            wanted = form(chosen, there, experts)
            given = (oc.shard_tensor(x, mesh, [oc.Shard(0)]) for x in (chosen, there))
            if not torch.equal(oc.unshard(form(*given, experts)), wanted):
                found.setdefault(name, []).append(seed)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_decisions_are_one_cards(ranks: int) -> None:
    assert run_ranks(_differing, ranks, 30)[0] == {}


def _sent() -> tuple[int, int, int, int]:
    """Messages of a loss that is divided for a log, of a gradient that a hook divides, of one that a program does, of a mask."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    x = oc.shard_tensor(torch.randn(8, 4), mesh, [oc.Shard(0)])
    w = oc.shard_tensor(torch.randn(4, 3), mesh, [oc.Replicate()]).detach().requires_grad_()

    def messages(run: Callable[[], object]) -> int:
        with oc.explain() as told:
            run()
        return len(told.messages)

    loss = (x @ w).square().sum()
    logged = messages(lambda: loss.detach() / 4 + loss.detach() / 8)
    w.register_hook(lambda grad: grad / 3)
    hooked = messages(lambda: loss.backward(retain_graph=True))
    w.grad = None
    kept = messages(lambda: ((x @ w) * (torch.ones(3) > 0)).sum())
    pending = (x @ w).detach().sum(0)
    mask = messages(lambda: pending * (torch.ones(3) > 0))
    return logged, hooked, kept, mask


def test_nothing_else_is_added_up_early() -> None:
    assert run_ranks(_sent, 2)[0] == (0, 1, 0, 0)  # a hook is given the whole gradient in any case
