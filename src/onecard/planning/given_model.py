"""The model whose price is asked for: whether it can be recorded, and what would help if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onecard.errors import PlanError
from onecard.planning.plan import Plan

_HALF = {"bfloat16": "BFloat16", "float16": "Half"}


def check_made(model: nn.Module) -> None:
    """Parameters have shapes: those of lazy layers come with a first batch.

    Raises:
        PlanError: one has none. Names it.
    """
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise PlanError(
                f"price: {name!r} of {type(model).__name__} has no shape yet: call the model once with a batch before its price "
                "is asked for, or give the layer its sizes (nn.Linear in place of nn.LazyLinear)"
            )


@contextmanager
def in_precision_of(plan: Plan) -> Iterator[None]:
    """Inside, a model runs in the plan's precision: what torch refuses in a half one may work in float32, which is said."""
    own = plan.compute in (plan.parameters, "float32") or plan.compute.startswith("float8")
    try:
        with nullcontext() if own else torch.autocast("cpu", dtype=getattr(torch, plan.compute)):
            yield
    except (RuntimeError, NotImplementedError) as fault:
        if plan.compute in _HALF and any(word in str(fault) for word in (plan.compute, _HALF[plan.compute])):
            fault.add_note(
                f"price: the plan computes in {plan.compute}, which an operator of the model does not take: "
                'oc.Plan(parameters="float32", compute="float32")'
            )
        raise
