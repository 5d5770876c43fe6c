"""Learning rates that the step reads in Python itself: followed as an optimizer's own reads are, right at every call."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparing import compared, never
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

Update = Callable[[Tensor, Tensor, float], Any]

FOLLOWED: dict[str, Update] = {
    "alpha": lambda p, g, lr: p.add_(g, alpha=-lr),
    "torch.tensor": lambda p, g, lr: p.sub_(g * torch.tensor(lr)),
    "math.sqrt": lambda p, g, lr: p.sub_(g * math.sqrt(lr)),
    "math.exp": lambda p, g, lr: p.mul_(math.exp(-lr)).sub_(g, alpha=lr),
    "math.pow": lambda p, g, lr: p.sub_(g * math.pow(lr, 2)),
    "**": lambda p, g, lr: p.mul_(1 - lr**2).sub_(g, alpha=lr),
    "item": lambda p, g, lr: p.sub_(g * torch.tensor(lr).item()),
    "foreach": lambda p, g, lr: torch._foreach_add_([p], [g], alpha=-lr),
    "addcmul": lambda p, g, lr: p.addcmul_(g, torch.ones_like(p), value=-lr),
    "warmup": lambda p, g, lr: p.sub_(g * (lr * 0.5 + 0.01) / 2),
}
CONDITIONS: dict[str, Update] = {
    "branch": lambda p, g, lr: p.sub_(g * (0.1 if lr > 0.06 else 0.01)),
    "max": lambda p, g, lr: p.sub_(g * max(lr, 0.05)),
    "int": lambda p, g, lr: p.sub_(g * 0.01 * int(lr * 20)),
    "float": lambda p, g, lr: p.sub_(g * float(lr)),
    "numpy": lambda p, g, lr: p.sub_(g * float(np.sqrt(lr))),
}


def trained(update: Update, static: bool, keep: Callable[[float], Any] = lambda lr: None, count: int = 8) -> Any:
    """Losses and learning rates of each call, and the step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        lr = optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for p in model.parameters():
                update(p, p.grad, lr)
        keep(lr)
        return {"loss": loss.detach(), "lr": lr, "half": lr / 2}

    run = oc.to_static(step) if static else step
    rows, found = torch.Generator().manual_seed(1), []
    with compared(never), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
        warnings.filterwarnings("ignore", message="(?s).*(recorded anew|and none fits)")
        for _ in range(count):
            out = run(torch.randn(4, 3, generator=rows))
            found.append([out["loss"].item(), out["lr"], out["half"]])
            schedule.step()
    return found, run


@pytest.mark.share(1)
@pytest.mark.parametrize("name", [*FOLLOWED, *CONDITIONS])
def test_a_learning_rate_read_by_hand(name: str) -> None:
    update = {**FOLLOWED, **CONDITIONS}[name]
    expected, _ = trained(update, static=False)
    found, run = trained(update, static=True)
    assert found == expected
    if name in FOLLOWED:
        assert len(run.recordings) == 1


def test_what_the_step_keeps_is_a_float() -> None:
    """In lists, dicts and attributes: C code would read a followed number as not a number."""
    log: list[Any] = []
    table: dict[str, Any] = {}

    class Holder:
        last = 0.0

    def keep(lr: float) -> None:
        log.append(lr)
        log.append({"deep": [lr * 2]})
        table["lr"] = lr
        Holder.last, holder.last = lr, lr

    holder = Holder()
    trained(FOLLOWED["alpha"], True, keep)
    assert type(holder.last) is type(table["lr"]) is float and "NaN" not in json.dumps([log, table, holder.last])
    assert all(type(x) is float for x in log[::2]) and type(log[3]["deep"][0]) is float


def test_a_learning_rate_that_the_step_sets_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    static = oc.to_static(step)
    static(torch.ones(2, 3))
    with pytest.raises(RecordingError, match="the step sets an optimizer's lr"):
        static(torch.ones(2, 3))
    assert optimizer.param_groups[0]["lr"] == 0.125 and type(optimizer.param_groups[0]["lr"]) is float
