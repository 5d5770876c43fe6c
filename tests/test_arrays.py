"""Arrays of numpy that a program takes of parameters while ZeRO-3 has gathered them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onecard as oc
from onecard.comm.agree.prints import fingerprint
from onecard.testing import run_ranks


def trained(plan: oc.Plan | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    arrays: list[Any] = []
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
    if plan is not None:
        model, optimizer, *_ = oc.parallelize(model, optimizer, plan=plan)
    weight = model[0].weight

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        local = weight._local if isinstance(weight, oc.DistTensor) else weight
        arrays.append(local.detach().numpy())

    model[0].register_forward_pre_hook(look)
    losses = []
    for i in range(3):
        loss = model(torch.arange(24.0).view(4, 6) / 24 + i).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return [*losses, float(arrays[-1].size)]


def test_an_array_of_a_gathered_parameter_is_kept() -> None:
    plan = oc.Plan(dp=2, zero=3, per_host=0, parameters="float32", compute="float32")
    for found in run_ranks(trained, 2, plan):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(trained(None)))


def test_a_digest_leaves_memory_that_can_be_given_up() -> None:
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64):
        x = torch.ones(5).to(dtype)
        fingerprint(x)
        assert x.untyped_storage().resizable() or dtype is torch.bfloat16
