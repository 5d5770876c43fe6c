"""Norms of a fleet program's gradients, each parameter counted once, and clipping by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm import plain, trace
from onecard.comm.ranks import of_ranks
from onecard.fleet import gradients, sparse_gradients
from onecard.fleet.merging import waiting
from onecard.fleet.parameters import held
from onecard.fleet.strategy import FleetError
from onecard.fleet.twins import trained
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
    if grad.is_sparse:
        yield sparse_gradients.dense(grad) if what.dim >= 0 else grad.coalesce().values()
        return
    if isinstance(grad, DistTensor) or what.dim < 0 or not what.runs:
        yield grad._local if isinstance(grad, DistTensor) else grad
        return
    for start, length in what.owned():
        yield grad.narrow(what.dim, start, length)


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradient of the whole model, each parameter counted once, whatever is cut or copied.

    Every rank of the world calls it. Sums what is still to be summed.

    Raises:
        FleetError: an order that is not positive.
    """
    if norm_type <= 0:
        raise FleetError(f"grad_norm: norm_type is {norm_type}; want a positive number, or inf")
    chosen = [*map(trained, parameters)]
    gradients.sync(chosen)
    mine = [part for p in chosen for part in _owned(p) if part.numel()]
    device = next((p.device for p in chosen), torch.device("cpu"))
    world = of_ranks(name="world")
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in chosen)
    local = _local_norm(mine, norm_type) if mine else torch.zeros((), device=device, dtype=torch.float64)
    # Each rank's apart, in float64 and over the largest: the sum of their powers would be infinite before the norm is.
    norms = plain.all_gather(local.reshape(1), world, call="grad_norm")
    largest = norms.max()
    total = torch.linalg.vector_norm(norms / largest.clamp(min=1e-300), norm_type) * largest
    return total.to(torch.float64 if wide else torch.float32)


def _local_norm(mine: list[Tensor], norm_type: float) -> Tensor:
    norm = torch.nn.utils.get_total_norm(mine, norm_type).to(torch.float64)
    # In their own dtype, which is 20 times as fast; its squares may be infinite where its norm is not.
    if norm.device.type == "cpu" and recorded.recorder is None and not trace.faking() and not norm.isfinite():
        each = [torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float64)) for g in mine]
        return torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, of the whole model: the norm is the same on all ranks, and one card's.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: it is not finite, and ``error_if_nonfinite``.
    """
    chosen = [*map(trained, [parameters] if isinstance(parameters, Tensor) else parameters)]
    if any(isinstance(p, DistTensor) for p in chosen) and not gradients.of_fleet(
        chosen
    ):  # torch's norm is that of the whole
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
    waits = waiting(chosen)  # a step of several calls is clipped once, as one card's
    norm = grad_norm(chosen, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be clipped"
        )
    if not waits:
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
