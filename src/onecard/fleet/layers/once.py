"""Layers whose backward is written by hand are differentiated once; who needs second derivatives is told what has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from onecard.errors import FleetError


def differentiated_once(of: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As torch's ``once_differentiable``, for the backward of a function, with words of its own. ``of``: the layer's name."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in grads):
                return found
            asked = torch.empty(0, device="cpu", requires_grad=True)
            return _Refused.apply(of, asked, *found)

        return run

    return decorate


class _Refused(Function):
    @staticmethod
    def forward(ctx: Any, of: str, asked: Tensor, *found: Any) -> tuple[Any, ...]:
        ctx.of = of
        return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FleetError(
            f"{ctx.of} is differentiated twice (create_graph=True: a gradient penalty, a norm of gradients), and its backward, "
            "with its messages, is written by hand for once. By marks all derivatives are there: oc.shard_layer(layer, mesh), "
            "with weights Shard(0) for columns and Shard(1) for rows"
        )
