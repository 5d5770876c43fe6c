"""A program for one card, as it is proved under a plan: what a plan may ask, and how a module alone is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecard.auto.apply import check as applicable
from onecard.errors import ProofError
from onecard.planning.plan import Plan

LR = 0.1


def check(plan: Plan, world: int) -> None:
    """Whether a plan can be applied to a program for one card on so many ranks.

    Raises:
        ProofError: it is for another number of ranks.
        PlanError: it asks for what only a recorded step can have, by the field's name.
    """
    if plan.world != world:
        raise ProofError(f"prove(world={world}, plan=...): the plan is for {plan.world} ranks: leave world= out")
    applicable(plan, world)


def trained(model: nn.Module, steps: int, *args: Any) -> list[float]:
    """Train a module on one batch; its losses.

    Returns:
        What it returns, if that is one number, or has a ``loss``; else the mean square of all floats that it returns.
    """
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    losses = []
    for _ in range(steps):
        loss = loss_of(model(*args))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(made: Any) -> Tensor:
    """The number that training makes small, of what a model returns.

    Raises:
        ProofError: it returns no floats.
    """
    loss = getattr(made, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = made[0] if isinstance(made, list | tuple) else getattr(made, "logits", made)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise ProofError(
            f"prove(model, ...): it returns {type(made).__name__}, of which no loss is known: prove(program)"
        )
    return first if first.dim() == 0 else first.square().mean()
