"""Loss scaling: an infinity on one rank skips the step, and lowers the scale, on all; with torch's scaler, too."""

from __future__ import annotations

import functools
import inspect
from typing import Any
from weakref import WeakSet

import torch

from onecard._torch import patches
from onecard._torch import scaling as _torch_scaling
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.gradients import hooks, merging
from onecard.fleet.gradients import sums as gradients

_unscale, _step, _update = torch.amp.GradScaler.unscale_, torch.amp.GradScaler.step, torch.amp.GradScaler.update
_resting: WeakSet[torch.amp.GradScaler] = WeakSet()


_PADDLES = {
    "enable": "enabled",
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
}
"""Names of ``paddle.amp.GradScaler``, and torch's."""


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a fleet program: an infinity on one rank skips the step, and lowers the scale, on all.

    It takes torch's arguments, by Paddle's names, too: ``init_loss_scaling``, ``incr_ratio``, ``decr_ratio``,
    ``incr_every_n_steps``, ``use_dynamic_loss_scaling``, ``enable``. Without ``device`` it is for this rank's.

    Raises:
        FleetError: an argument that neither has, or one by both names; what torch's scaler cannot do.

    Source: ``paddle.distributed.fleet.distributed_scaler``, ``paddle.amp.GradScaler``.

    Example:
        >>> GradScaler("cpu", init_loss_scaling=1024.0).get_scale()
        1024.0
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("decr_every_n_nan_or_inf", 1) != 1:
            raise FleetError(
                "GradScaler(decr_every_n_nan_or_inf=): the scale falls at each infinity, as torch's does: leave it out"
            )
        if not kwargs.pop("use_dynamic_loss_scaling", True):  # torch's wants factors that are not 1
            kwargs |= {"growth_factor": 1.0 + 1e-9, "backoff_factor": 1.0 - 1e-9, "growth_interval": 2**31 - 1}
        known = inspect.signature(torch.amp.GradScaler).parameters
        if strange := [name for name in kwargs if name not in known and name not in _PADDLES]:
            raise FleetError(f"GradScaler({strange[0]}=): it takes {', '.join([*known, *_PADDLES])}")
        given = inspect.signature(torch.amp.GradScaler).bind_partial(*args).arguments
        for name in [name for name in kwargs if name in _PADDLES]:
            if _PADDLES[name] in kwargs or _PADDLES[name] in given:
                raise FleetError(f"GradScaler: {name} and {_PADDLES[name]} are one argument")
            kwargs[_PADDLES[name]] = kwargs.pop(name)
        if "device" not in kwargs and "device" not in given:
            kwargs["device"] = world.device().type  # the ranks'; torch's own would be off without a GPU
        super().__init__(*args, **kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients, divide them by the scale, and ask all ranks whether theirs are finite."""
        unscale(self, optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """The optimizer's step, unless a gradient is infinite anywhere."""
        return step(self, optimizer, *args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scale of a state.

        Raises:
            FleetError: the state of a scaler that was switched off, into one that is on.
        """
        if self.is_enabled() and not state_dict:
            raise FleetError(
                "the state of a GradScaler that was switched off (enabled=False) holds no scale to go on with: leave out "
                "load_state_dict, and this one begins with its init_scale; or make it with enabled=False, as that one was"
            )
        super().load_state_dict(state_dict)


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """``scaler.unscale_(optimizer)`` of the whole gradients; nothing, as torch's, where the scaler is switched off."""
    if not scaler.is_enabled() or merging.waits(optimizer):
        return
    parameters = gradients.of_optimizer(optimizer)
    hooks.sync(parameters)
    _unscale(scaler, optimizer)
    for p in parameters:
        gradients.note(p)
    world = of_ranks(name="world")
    for found in scaler._found_inf_per_device(optimizer).values():
        plain.all_reduce(found, world, "max", inplace=True, call="GradScaler")


def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
    """``scaler.step(optimizer)``; a fused optimizer, too, asks all ranks, before it reads the gradients."""
    if merging.waits(optimizer):  # its gradients go on adding up, under one scale
        if scaler.is_enabled():
            _resting.add(scaler)
        return optimizer.step(*args, **kwargs)
    if (
        scaler.is_enabled()
        and _torch_scaling.scales_itself(optimizer)
        and not _torch_scaling.has_unscaled(scaler, optimizer)
    ):
        unscale(scaler, optimizer)
    with merging.counted(optimizer):
        return _step(scaler, optimizer, *args, **kwargs)


def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
    """``scaler.update()``; nothing after a call in which every optimizer waited."""
    if self in _resting:
        _resting.discard(self)
        if new_scale is None and not _torch_scaling.has_checked(self):
            return
    _update(self, new_scale)


def install() -> None:
    """Have torch's scalers do the same where the optimizer has fleet's parameters."""
    for name, ours in (("unscale_", _routed(unscale, _unscale)), ("step", _routed(step, _step)), ("update", update)):
        patches.replace(f"torch.amp.GradScaler.{name}", torch.amp.GradScaler, name, functools.partial(_given, ours))


def _given(ours: Any, torchs: Any) -> Any:
    return ours


def _routed(ours: Any, torchs: Any) -> Any:
    def method(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        chosen = ours if merging.merges(optimizer) or gradients.of_fleet(gradients.of_optimizer(optimizer)) else torchs
        return chosen(self, optimizer, *args, **kwargs)

    return functools.wraps(torchs)(method)


def distributed_scaler(scaler: torch.amp.GradScaler) -> GradScaler:
    """A ``fleet.GradScaler`` with the settings of a torch one."""
    made = GradScaler("cpu", enabled=scaler.is_enabled())
    made.__dict__.update(scaler.__dict__)
    return made
