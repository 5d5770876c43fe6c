"""Options of Megatron-LM that stop it where another one is not there."""

from __future__ import annotations

from onecard.planning.audit.settings import Settings
from onecard.planning.fit import Finding

_NEEDS = (
    ("overlap-param-gather", ("use-distributed-optimizer", "use-megatron-fsdp", "use-custom-fsdp"), "zero"),
    ("overlap-param-gather", ("overlap-grad-reduce", "use-megatron-fsdp", "use-custom-fsdp"), "overlap"),
    ("tp-comm-overlap", ("sequence-parallel",), "overlap_tp"),
)
"""An option, those of which its assertion wants one (``megatron/training/arguments.py``), and the field of the plan."""


def missing(settings: Settings) -> list[Finding]:
    """Options that are given without what they need."""
    return [
        Finding(
            "mistake",
            field,
            f"--{option} without --{needed[0]}: Megatron-LM stops at its start",
            f"add --{needed[0]}, or leave --{option} out",
            settings.where(option),
        )
        for option, needed, field in _NEEDS
        if settings.has(option) and not any(settings.has(name) for name in needed)
    ]
