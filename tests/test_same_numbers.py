"""Numbers of Python in operators on distributed tensors count for the whole tensor: ranks that give other ones are told."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onecard as oc
from onecard.testing import RankError, run_ranks


def divided(loss: Any, model: Any, n: float) -> Any:
    return loss / n


def scaled(loss: Any, model: Any, n: float) -> Any:
    return loss * (1 / n)


def smoothed(loss: Any, model: Any, n: float) -> Any:
    return loss + F.cross_entropy(model[0].weight, torch.zeros(6, dtype=torch.int64), label_smoothing=n / 10)


def dropped(loss: Any, model: Any, n: float) -> Any:
    return loss + F.dropout(model[0].weight, n / 10).square().sum()


def clamped(loss: Any, model: Any, n: float) -> Any:
    return loss.clamp(max=n * 100)


def chosen(loss: Any, model: Any, n: float) -> Any:
    return loss + model[0].weight[int(n)].sum()


def of_a_list(loss: Any, model: Any, n: float) -> Any:
    return loss + sum(x.sum() for x in torch._foreach_mul([*model.parameters()], n))


def gradients(loss: Any, model: Any, n: float) -> Any:
    """Behind backward, outside autograd."""
    for p in model.parameters():
        p.grad.mul_(n)


def averages(loss: Any, model: Any, n: float) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.lerp_(torch.zeros_like(p), n / 100)


INSIDE, BEHIND = (divided, scaled, smoothed, dropped, clamped, chosen, of_a_list), (gradients, averages)


def train(inside: int, behind: int, apart: int, recorded: bool, begin: int = 0, calls: int = 18) -> float:
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(np.arange(2), ["dp"])
    model = oc.shard_layer(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), mesh)
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def step(x: Any, n: float) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss = loss if inside < 0 else INSIDE[inside](loss, model, n)
        loss.backward()
        if behind >= 0:
            BEHIND[behind](loss, model, n)
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step) if recorded else step
    for call in range(calls):
        n = 3.0 + (apart * oc.get_rank() if call >= begin else 0)
        loss = run(oc.shard_tensor(torch.randn(8, 5), mesh, [oc.Shard(0)]), n)
        if oc.get_rank() == 0:  # one rank may look at what it has on its own
            with torch.no_grad():
                _ = (model[0].weight * random.random()).to_local() / (2 + random.random())
            print(loss * random.random() / 3)
    return float(loss)


@pytest.mark.parametrize("inside", range(len(INSIDE)), ids=[f.__name__ for f in INSIDE])
def test_a_rank_with_a_number_of_its_own_is_told(inside):
    words = r"'\w+' is .* on rank 0 and .* on rank 1. A number of Python counts for the whole tensor"
    with pytest.raises(RankError, match=words):
        run_ranks(train, 2, inside, -1, 1, False)
    run_ranks(train, 2, inside, -1, 0, False)


@pytest.mark.parametrize("behind", range(len(BEHIND)), ids=[f.__name__ for f in BEHIND])
def test_and_what_is_done_behind_backward(behind):
    with pytest.raises(RankError, match=r"(mul_|lerp_) at \S+py:\d+: '\w+' is .* on rank 0 and .* on rank 1"):
        run_ranks(train, 2, -1, behind, 1, False)
    run_ranks(train, 2, -1, behind, 0, False)


@pytest.mark.parametrize("begin", [0, 9])
def test_and_a_recorded_step(begin):
    """It is compared where the step runs as it is: at its first call, and now and then."""
    with pytest.raises(RankError, match=r"div at \S+py:\d+: 'other' is 3.0 on rank 0 and 4.0 on rank 1"):
        run_ranks(train, 2, 0, -1, 1, True, begin)
    run_ranks(train, 2, 0, 0, 0, True)


def test_a_fault_that_begins_late_is_told():
    """After the first messages those are looked at whose hash says so, on all ranks alike."""
    with pytest.raises(RankError, match=r"div at \S+py:\d+: 'other' is 3.0 on rank 0 and 4.0 on rank 1"):
        run_ranks(train, 2, 0, -1, 1, False, 60, 200)


def test_and_under_the_debug_check(monkeypatch):
    monkeypatch.setenv("ONECARD_CHECK", "1")
    with pytest.raises(RankError, match=r"the number 'other' counts for the whole, but it differs between ranks"):
        run_ranks(train, 2, 0, -1, 1, False)


def by_hand(lr: float) -> None:
    """Local tensors are each rank's own, and so are numbers of them."""
    mesh = oc.ProcessMesh(np.arange(2), ["dp"])
    x = oc.shard_tensor(torch.ones(4, 3), mesh, [oc.Shard(0)])
    mine = x.to_local() * (1.0 + oc.get_rank())
    assert float(oc.from_local(mine, mesh, [oc.Shard(0)]).sum()) == 6 + 12
    for width in (3, 2):
        assert x.narrow(1, 0, width).sum(0).reshape(width).shape == (width,)
    assert float((x * (lr * (1 + 1e-9 * oc.get_rank()))).sum()) == pytest.approx(12 * lr)


def test_local_numbers_and_rounding_are_let_be():
    run_ranks(by_hand, 2, 0.3)
