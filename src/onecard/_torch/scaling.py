"""What onecard takes from torch's loss scaling without torch's promise to keep it; the rest is in ``_torch``."""

from __future__ import annotations

from typing import Any

import torch

from onecard._torch.names import no_fakes


def scales_itself(optimizer: Any) -> bool:
    """Whether its step takes the scale and the infinities (fused), and a scaler does not call ``unscale_`` for it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether ``unscale_`` was called since the last ``update``."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"


def has_checked(scaler: Any) -> bool:
    """Whether it has asked for infinities since the last ``update``."""
    return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())


def begun(scaler: Any, device: torch.device) -> list[torch.Tensor]:
    """Its scale and its count, which the first loss makes if they are not there yet; none of one that is switched off."""
    if not scaler.is_enabled():
        return []
    if scaler._scale is None:
        kind = torch.device(scaler._device)  # "cpu" or "cuda", as it was made for
        with no_fakes():
            scaler.scale(torch.zeros((), device=device if device.type == kind.type else kind))
    return [scaler._scale, scaler._growth_tracker]
