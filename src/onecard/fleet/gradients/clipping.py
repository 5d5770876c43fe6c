"""Norms of a fleet program's gradients, each parameter counted once, and clipping by them, torch's own included.

``torch.nn.utils.clip_grad_norm_`` sees plain local tensors: its norm would be of this rank's parts, before they are summed,
another one on each rank, and copies of a parameter would drift apart without a word. So fleet's parameters come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch import patches
from onecard.errors import FleetError
from onecard.fleet.gradients import holders, hooks
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.merging import waiting
from onecard.fleet.gradients.twins import trained
from onecard.tensor import DistTensor
from onecard.train import norms
from onecard.train.shard import held


def _grad(p: Tensor) -> Tensor | None:
    return p.grad


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradient of the whole model, each parameter counted once, whatever is cut or copied.

    Every rank of the world calls it. Sums what is still to be summed.

    Raises:
        FleetError: an order that is not positive.
    """
    if norm_type <= 0:
        raise FleetError(f"grad_norm: norm_type is {norm_type}; want a positive number, or inf")
    chosen = [*map(trained, parameters)]
    hooks.sync(chosen)
    return _norm_of(chosen, norm_type, "grad_norm")


def _norm_of(
    chosen: list[Tensor], norm_type: float, call: str, of: Callable[[Tensor], Tensor | None] = _grad
) -> Tensor:
    """The norm of the whole gradients of parameters, or of what else each has."""
    mine = [[*norms.counted(held(p), x, holders.lines(p))] for p in chosen if (x := of(p)) is not None]
    device = next((p.device for p in chosen), torch.device("cpu"))
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in chosen)
    return norms.joined(mine, norm_type, device, call, explicit=True, same=holders.on_all_ranks(chosen)).to(
        torch.float64 if wide else torch.float32
    )


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
    if any(isinstance(p, DistTensor) for p in chosen) and not gradients.of_fleet(chosen):
        # torch's norm is that of the whole
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


class ClipGradForMOEByGlobalNorm(ClipGradByGlobalNorm):
    """Paddle's object for mixtures. Parameters say themselves which are experts, so that all but the norm may be left out.

    Source: ``paddle.incubate.distributed.models.moe.ClipGradForMOEByGlobalNorm``.
    """

    def __init__(
        self,
        clip_norm: float,
        is_expert_param_func: Callable[[Any], bool] | None = None,
        moe_group: Any = None,
        group_name: str = "default_moe_group",
    ) -> None:
        super().__init__(clip_norm)


def install() -> None:
    """Once a process: torch's clipping hands fleet's parameters to fleet's."""
    patches.within("torch.nn.utils.clip_grad_norm_", torch.nn.utils.clip_grad_norm_, _norm)
    patches.within("fleet: torch.nn.utils.get_total_norm", torch.nn.utils.get_total_norm, _total)
    patches.within("torch.nn.utils.clip_grad_value_", torch.nn.utils.clip_grad_value_, _value)


def _norm(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def clipped(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        parameters = _listed(parameters)
        if gradients.of_fleet(parameters):
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return clipped


def _total(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        own: list[Tensor] = [x for x in listed if isinstance(x, nn.Parameter)]
        if any((line := held(p).group) is not None and line.size > 1 for p in own):
            return _of_values(listed, own, norm_type)
        owners = [p for x in listed if (p := hooks.owner_of(x)) is not None]
        if not gradients.of_fleet(owners):
            return torchs(listed, norm_type, error_if_nonfinite, foreach)
        if len(owners) < len(listed):
            raise FleetError(
                f"get_total_norm: of {len(listed)} tensors {len(owners)} are gradients of fleet's parameters, of which a rank "
                "has parts, and others are none: ask for the norm of the gradients alone ([p.grad for p in model.parameters()])"
            )
        hooks.sync(owners)
        norm = _norm_of(owners, norm_type, "get_total_norm")
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm.item()}")
        return norm

    return get_total_norm


def _of_values(listed: list[Any], own: list[Tensor], norm_type: float) -> Tensor:
    """The norm of whole parameters, as of their gradients."""
    if len(own) < len(listed):
        raise FleetError(
            f"get_total_norm: of {len(listed)} tensors {len(own)} are fleet's parameters, of which a rank has parts, and others "
            "are none: ask for the norm of the parameters alone (model.parameters())"
        )
    return _norm_of(own, norm_type, "get_total_norm", lambda p: p.detach())


def _value(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        parameters = _listed(parameters)
        if not gradients.of_fleet(parameters):
            return torchs(parameters, clip_value, foreach)
        if waiting(parameters):
            return None
        hooks.sync(parameters)
        torchs(parameters, clip_value, foreach)
        for p in parameters:
            gradients.note(p)

    return clip_grad_value_


def _listed(parameters: Any) -> Any:
    """Something that can be looked at twice; what is empty stays what it is, for torch's own warning."""
    if isinstance(parameters, Tensor):
        return [trained(parameters)]
    listed = [*map(trained, parameters)]
    return listed or (x for x in listed)
