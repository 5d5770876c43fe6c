"""Norms of a fleet program's gradients, each parameter counted once, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard.comm import plain
from onecard.comm.ranks import of_ranks
from onecard.fleet import gradients
from onecard.fleet.parameters import held
from onecard.tensor import DistTensor


def _owned(p: Tensor) -> Iterator[Tensor]:
    """What this rank counts of a gradient: each element of the whole is counted on one rank of the world."""
    from onecard.fleet.topology import get_hybrid_communicate_group

    what, grad = held(p), p.grad
    if grad is None:
        return
    cut = set(what.group.ranks) if what.group is not None else set()
    if isinstance(grad, DistTensor) and any(grad._spec.layout.dims):
        cut |= {*grad.mesh.process_ids}
    hcg = get_hybrid_communicate_group()
    for axis, degree in hcg.degrees.items():
        line = hcg.group(axis)
        copies = degree > 1 and not (axis == "pp" or set(line.ranks) <= cut)
        if copies and line.index != 0:
            return
    for group in what.sums:
        if group.index != 0:
            return
    if isinstance(grad, DistTensor) or what.dim < 0 or not what.runs:
        yield grad._local if isinstance(grad, DistTensor) else grad
        return
    for start, length in what.owned():
        yield grad.narrow(what.dim, start, length)


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradient of the whole model, each parameter counted once, whatever is cut or copied.

    Every rank of the world calls it. Sums what is still to be summed.
    """
    chosen = [p for p in parameters]
    gradients.sync(chosen)
    mine = [part for p in chosen for part in _owned(p) if part.numel()]
    device = next((p.device for p in chosen), torch.device("cpu"))
    world = of_ranks(name="world")
    if norm_type == math.inf:
        largest = torch.stack([p.abs().max().float() for p in mine]).max() if mine else torch.zeros((), device=device)
        return plain.all_reduce(largest, world, "max", call="grad_norm")
    total = torch.zeros((), device=device, dtype=torch.float32)
    if mine:
        total = torch.nn.utils.get_total_norm(mine, norm_type).float() ** norm_type
    return plain.all_reduce(total, world, call="grad_norm") ** (1.0 / norm_type)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, of the whole model: the norm is the same on all ranks, and one card's.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: it is not finite, and ``error_if_nonfinite``.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(isinstance(p, DistTensor) for p in chosen) and not gradients.of_fleet(
        chosen
    ):  # torch's norm is that of the whole
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
    norm = grad_norm(chosen, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be clipped"
        )
    gradients.scale(chosen, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


class ClipGradByGlobalNorm:
    """Paddle's object for ``fleet.distributed_optimizer(opt, grad_clip=ClipGradByGlobalNorm(1.0))``.

    Paddle scales by clip / max(clip, norm), torch by clip / (norm + 1e-6); here it is torch's.
    """

    def __init__(self, clip_norm: float = 1.0) -> None:
        self.clip_norm = clip_norm

    def __call__(self, parameters: Any) -> Tensor:
        return clip_grad_norm_(parameters, self.clip_norm)
