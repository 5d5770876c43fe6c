"""What onecard takes from torch's loss scaling without torch's promise to keep it; the rest is in ``_torch``."""

from __future__ import annotations

from typing import Any


def scales_itself(optimizer: Any) -> bool:
    """Whether its step takes the scale and the infinities (fused), and a scaler does not call ``unscale_`` for it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether ``unscale_`` was called since the last ``update``."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"


def has_checked(scaler: Any) -> bool:
    """Whether it has asked for infinities since the last ``update``."""
    return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())


def has_begun(scaler: Any) -> bool:
    """Whether its scale is there as a tensor, which the first loss makes; one that is switched off needs none."""
    return not scaler.is_enabled() or scaler._scale is not None
