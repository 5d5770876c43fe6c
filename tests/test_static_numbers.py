"""Floats among a step's arguments that take part in what autograd differentiates: followed, or told by a new recording."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

Loss = Callable[[Tensor, float], Tensor]

FOLLOWED: dict[str, Loss] = {
    "a factor": lambda x, t: (x.square() * t).mean(),
    "a factor in front": lambda x, t: (t * x.square()).mean(),
    "of a loss": lambda x, t: x.square().mean() * t,
    "a call": lambda x, t: torch.mul(x, t).square().mean(),
    "a divisor": lambda x, t: (x / t).square().mean(),
    "divided": lambda x, t: (t / (x.square() + 1)).mean(),
    "a summand": lambda x, t: (x + t).square().mean() + t,
    "a difference": lambda x, t: (t - x).square().mean() - t,
    "in place": lambda x, t: (x * 1).mul_(t).square().mean(),
    "assigned": lambda x, t: _assigned(x * 1, t).square().mean(),
    "arithmetic": lambda x, t: (x * (1 - t) + x.sin() * t**2).mean(),
    "twice": lambda x, t: (x * t).sin().mean() + (x * t).cos().mean() * t,
    "in float64": lambda x, t: (x.double() * t).square().mean().float(),
    "in bfloat16": lambda x, t: (x.bfloat16() * t).float().square().mean(),
}
ANEW: dict[str, Loss] = {
    "an exponent": lambda x, t: (x.abs() + 0.1).pow(t).mean(),
    "an argument": lambda x, t: nn.functional.huber_loss(x, torch.zeros_like(x), delta=t),
    "alpha": lambda x, t: torch.add(x, x.sin(), alpha=t).square().mean(),
    "a part": lambda x, t: _part(x * 1, t).square().mean(),
    "a second derivative": lambda x, t: _second(x, t),
}


def _assigned(x: Tensor, t: float) -> Tensor:
    x *= t
    return x


def _part(x: Tensor, t: float) -> Tensor:
    x[0] *= t
    return x


def _second(x: Tensor, t: float) -> Tensor:
    (grad,) = torch.autograd.grad((x.square() * t).sum(), x, create_graph=True)
    return (grad * x.detach()).square().mean()


def trained(loss: Loss | str, plan: dict[str, Any] | None, static: bool = True) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of = (FOLLOWED | ANEW)[loss] if isinstance(loss, str) else loss

    def step(x: Tensor, t: float) -> Tensor:
        found = of(model(x), t)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    run: Any = step
    if static:
        run = oc.to_static(step, plan=oc.Plan(**plan)) if plan else oc.to_static(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step is recorded anew")
        found = [run(torch.randn(8, 6), 0.5 + 0.25 * i).item() for i in range(6)]
    return found, len(getattr(run, "recordings", ()))


@pytest.mark.parametrize("kind", [*FOLLOWED, *ANEW])
def test_it_may_change_at_every_call(kind):
    expected, _ = trained(kind, None, static=False)
    found, recordings = trained(kind, None)
    assert found == expected
    assert (recordings == 1) is (kind in FOLLOWED)


def test_in_a_checkpointed_forward_it_is_refused():
    with pytest.raises(RecordingError, match="in a checkpointed forward pass it as a tensor"):
        trained(lambda x, t: checkpoint(lambda x: (x.sin() * t).sin(), x, use_reentrant=False).mean(), None)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "plan", [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 2}]
)
def test_under_plans(plan):
    """Where it was a part of the loss, the parameters could not be laid out: "a graph of autograd holds this parameter"."""
    for kind in ("of a loss", "a divisor", "arithmetic"):
        expected, _ = trained(kind, None, static=False)
        for found, recordings in run_ranks(trained, 2, kind, plan):
            assert found == pytest.approx(expected, rel=1e-5)
            assert recordings == 1
