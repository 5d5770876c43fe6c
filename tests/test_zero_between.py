"""Levels of ZeRO as recorded steps: what a program writes to parameters, and reads of them, between two calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from amounts import share
from torch import Tensor, nn
from torch.nn import functional as F

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks

LEVELS = ("os", "os_g", "p_g_os")
CALLS = 8
AT = (3, 5)  # calls that are replayed before and after; every power of two is held against its recording


def _each(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1.5)


def _by_layer(model: nn.Module) -> None:
    for m in model.modules():
        for p in m.parameters(recurse=False):
            p.mul_(1.5)


def _name(model: Any) -> nn.Module:
    return model[2]


WRITES: dict[str, Callable[[Any], Any]] = {
    "by name": lambda net: _name(net).weight.mul_(3.0),
    "copied": lambda net: _name(net).weight.copy_(torch.full((3, 6), 0.3)),
    "data": lambda net: _name(net).weight.data.mul_(3.0),
    "one number": lambda net: _name(net).bias[1].fill_(0.7),
    "apply": lambda net: net.apply(lambda m: m.weight.mul_(1.5) if hasattr(m, "weight") else None),
    "init": lambda net: nn.init.constant_(_name(net).bias, 0.2),
    "all": _each,
    "by layer": _by_layer,
    "state": lambda net: net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()}),
    "getattr": lambda net: getattr(_name(net), "weight").mul_(0.5),  # noqa: B009
}
READS: dict[str, Callable[[Any], Any]] = {
    "by name": lambda net: _name(net).weight.abs().sum(),
    "no grad": torch.no_grad()(lambda net: _name(net).weight.abs().sum()),
    "data": lambda net: _name(net).weight.data.abs().sum(),
    "called": lambda net: F.linear(torch.ones(2, 6), _name(net).weight, _name(net).bias).sum(),
    "norm": lambda net: torch.stack([m.weight.detach().norm() for m in net if hasattr(m, "weight")]).sum(),
    "model": lambda net: net(torch.ones(2, 4)).sum(),
    "model without graph": torch.no_grad()(lambda net: net(torch.ones(2, 4)).sum()),
    "layer": lambda net: _name(net)(torch.ones(2, 6)).sum(),
    "state": lambda net: net.state_dict()["2.weight"].abs().sum(),
    "a graph that is kept": lambda net: KEPT.append(_name(net).weight.square().sum()) or KEPT[-1],
}
KEPT: list[Tensor] = []


def _trained(level: str, zero: str, writes: str, reads: str) -> tuple[list[float], int]:
    warnings.simplefilter("error")
    torch.manual_seed(0)
    KEPT.clear()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(8, 4)
    model: Any = net
    optimizer: Any = torch.optim.AdamW(net.parameters(), 0.05)
    if level:
        fleet.init(is_collective=True)
        model, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, level)
        x = x.chunk(oc.get_world_size())[oc.get_rank()]

    def step(x: Tensor) -> Tensor:
        if zero == "first":
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if zero == "last":
            optimizer.zero_grad()
        return loss.detach()

    run: Any = oc.to_static(step) if level else step
    seen: list[float] = []
    for call in range(CALLS):
        if call in AT and writes:
            with torch.no_grad():
                WRITES[writes](net)
        loss = run(x).clone()
        if level:
            dist.all_reduce(loss)
            loss /= oc.get_world_size()
        seen.append(float(loss))
        if reads:
            seen.append(float(READS[reads](net).detach()))
    return seen, len(run.recordings) if level else 1


def _all(level: str) -> dict[tuple[str, str, str], tuple[list[float], int]]:
    table = [("last", how, "") for how in WRITES] + [("last", "", how) for how in READS]
    table += [("first", "by name", "by name"), ("last", "data", "data"), ("last", "all", "model")]
    return {each: _trained(level, *each) for each in share(table, 9)}


@pytest.fixture(scope="module")
def wanted() -> dict[Any, Any]:
    return _all("")


@pytest.mark.parametrize("level", LEVELS)
def test_as_on_one_card(level: str, wanted: dict[Any, Any]) -> None:
    """The level is replayed, without a warning, from one recording."""
    found = run_ranks(_all, 2, level)[0]
    wrong = {
        each: (losses, wanted[each][0], recordings)
        for each, (losses, recordings) in found.items()
        if losses != pytest.approx(wanted[each][0], rel=1e-5) or recordings != 1
    }
    assert not wrong
