"""Schedules of optimizers whose groups stand otherwise than they were saved: each parameter goes on with its own rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of

import onecard as oc

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: of.LambdaLR(o, [lambda n: 0.9**n] * len(o.param_groups)),
    "step": lambda o: of.StepLR(o, 2, 0.5),
    "cosine": lambda o: of.CosineAnnealingLR(o, 20),
    "restarts": lambda o: of.CosineAnnealingWarmRestarts(o, 4),
    "one cycle": lambda o: of.OneCycleLR(o, [10 * g["lr"] for g in o.param_groups], total_steps=20),
    "cyclic": lambda o: of.CyclicLR(o, [g["lr"] for g in o.param_groups], [9 * g["lr"] for g in o.param_groups], 3),
    "plateau": lambda o: of.ReduceLROnPlateau(o, factor=0.8, patience=0, min_lr=[g["lr"] / 4 for g in o.param_groups]),
    "in turn": lambda o: of.SequentialLR(o, [of.LinearLR(o, 0.1, total_iters=2), of.CosineAnnealingLR(o, 9)], [4]),
    "chained": lambda o: of.ChainedScheduler([of.LinearLR(o, 0.1, total_iters=9), of.ExponentialLR(o, 0.9)]),
}


def program(groups: list[tuple[str, float]], schedule: Callable[[Any], Any]) -> tuple[nn.Module, Any, Any]:
    """A model and its optimizer with these groups: the children in each, and its rate."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("stem", "body", "head")})
    of_group = [{"params": [p for n in names.split() for p in model[n].parameters()], "lr": lr} for names, lr in groups]
    optimizer = torch.optim.SGD(of_group, lr=0.1, momentum=0.9)
    return model, optimizer, schedule(optimizer)


def train(model: Any, optimizer: Any, schedule: Any, steps: int) -> list[dict[str, float]]:
    """The rate of each child at each step."""
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        sum(m(torch.full((2, 3), 1.0 + step)).square().mean() for m in model.values()).backward()
        optimizer.step()
        schedule.step(*([1.0 + step] if isinstance(schedule, of.ReduceLROnPlateau) else []))
        rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        rates.append({name: float(rate_of[id(m.weight)]) for name, m in model.items()})
    return rates


def state_of(model: Any, optimizer: Any, schedule: Any, how: str) -> dict[str, Any]:
    if how == "objects":
        return {"model": model, "optimizer": optimizer, "schedule": schedule}
    return {"schedule": schedule.state_dict(), "model": model, "optimizer": optimizer}


TWO, THREE = [("stem body", 0.1), ("head", 0.004)], [("stem", 0.1), ("body", 0.1), ("head", 0.004)]


@pytest.mark.parametrize("how", ["objects", "dicts"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("before", "now"), [(TWO, TWO[::-1]), (TWO, THREE[::-1]), (TWO, TWO), (THREE, THREE[1:] + THREE[:1])]
)
def test_schedules_follow_the_groups(tmp_path: Path, name, before, now, how):
    first = program(before, SCHEDULES[name])
    train(*first, 3)
    oc.checkpoint.save(state_of(*first, how), tmp_path / "c")
    second = program(now, SCHEDULES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a schedule that is asked ahead of the optimizer
        train(*second, 1)
    state = state_of(*second, how)
    oc.checkpoint.load(tmp_path / "c", state)
    if how == "dicts":
        second[2].load_state_dict(state["schedule"])
    expected, found = train(*first, 5), train(*second, 5)
    assert len({rates["stem"] for rates in expected}) > 1 and all(r["stem"] > r["head"] for r in expected)
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a)


def test_whose_schedule_a_dict_is_is_told_where_it_is_not_known(tmp_path: Path):
    first, other = program(TWO, SCHEDULES["step"]), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    oc.checkpoint.save({**state_of(*first, "dicts"), "other": other}, tmp_path / "c")
    for groups, told in ((TWO[::-1], 1), (TWO, 0)):
        state = {**state_of(*program(groups, SCHEDULES["step"]), "dicts"), "other": other}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            oc.checkpoint.load(tmp_path / "c", state)
        assert len([w for w in found if "'schedule' is a schedule's state dict" in str(w.message)]) == told
