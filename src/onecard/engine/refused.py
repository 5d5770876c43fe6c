"""What of a strategy does not go together, in one table: the fields, when, why, and what to write instead. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onecard.errors import PlanError, StrategyError
from onecard.planning.plan import Plan
from onecard.static.passes import PASSES


@dataclass(frozen=True)
class Refusal:
    """Fields that do not go together: ``when`` they are so, the reason, and a call that works."""

    fields: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str
    instead: str


REFUSALS = [
    Refusal(
        ("pipeline.enable", "gradient_merge.enable"),
        lambda s: s.pipeline.enable and s.gradient_merge.enable,
        "a pipeline cuts the batch in microbatches and adds up their gradients already",
        "gradient_merge.enable=False, pipeline.accumulate_steps={s.gradient_merge.k_steps}",
    ),
    Refusal(
        ("amp.level", "sharding.enable"),
        lambda s: s.amp.enable and s.amp.level == "O2" and not s.sharding.enable,
        "the float32 copies of 16-bit parameters are states that a stage of ZeRO keeps",
        "sharding.enable=True (on one rank too), or amp.level='O1'",
    ),
    Refusal(
        ("amp.level", "amp.dtype"),
        lambda s: s.amp.enable and s.amp.level == "O2" and s.amp.dtype == "float16",
        "a scaler does not take gradients that are float16 themselves, as those of float16 parameters are",
        "amp.dtype='bfloat16', or amp.level='O1'",
    ),
    Refusal(
        ("amp.custom_white_list", "amp.custom_black_list"),
        lambda s: s.amp.enable and bool({*s.amp.custom_white_list} & {*s.amp.custom_black_list}),
        "a function cannot be in both lists",
        "each function in one of them",
    ),
    Refusal(
        ("fused_passes.enable", "recompute.memory_limit"),
        lambda s: s.fused_passes.enable and s.recompute.enable and s.recompute.memory_limit is not None,
        "torch's compiler decides itself what it keeps, so that a limit would not be held",
        "recompute.checkpoints=[...], or fused_passes.enable=False",
    ),
    Refusal(
        ("pipeline.schedule_mode", "pipeline.vpp_degree"),
        lambda s: s.pipeline.enable and _schedule_fault(s) != "",
        "the schedule has another number of stages on each rank",
        "pipeline.vpp_degree=2 for VPP, BFS and ZBV, 1 for the others",
    ),
    Refusal(
        ("fused_passes.without",),
        lambda s: bool({*s.fused_passes.without} - {*PASSES}),
        "there is no such pass",
        "some of " + ", ".join(PASSES),
    ),
]  # fmt: skip


def check(strategy: Any) -> None:
    """Refuse what does not go together.

    Raises:
        StrategyError: with the fields, the reason and what to write.

    Example:
        >>> from onecard.engine.strategy import Strategy
        >>> check(Strategy(amp={"enable": True, "level": "O2"}))
        Traceback (most recent call last):
        onecard.errors.StrategyError: Strategy: amp.level='O2' with sharding.enable=False: the float32 copies of 16-bit parameters
        are states that a stage of ZeRO keeps. Write sharding.enable=True (on one rank too), or amp.level='O1'
    """
    for refusal in REFUSALS:
        if refusal.when(strategy):
            said = " with ".join(f"{field}={_value(strategy, field)!r}" for field in refusal.fields)
            instead = refusal.instead.replace("{s.gradient_merge.k_steps}", str(strategy.gradient_merge.k_steps))
            raise StrategyError(f"Strategy: {said}: {refusal.why}. Write {instead}", refusal.fields[0])


def _value(strategy: Any, field: str) -> Any:
    for name in field.split("."):
        strategy = getattr(strategy, name)
    return strategy


def _schedule_fault(strategy: Any) -> str:
    """What a plan says of the schedule."""
    try:
        Plan(pp=2, schedule=strategy.pipeline.schedule_mode, virtual=strategy.pipeline.vpp_degree)
    except PlanError as fault:
        return str(fault)
    return ""


def table() -> str:
    """The rows of a page."""
    rows = []
    for each in REFUSALS:
        fields = ", ".join(f"`{field}`" for field in each.fields)
        instead = each.instead.replace("{s.gradient_merge.k_steps}", "4")
        rows.append(f"| {fields} | {each.why} | {instead} |")
    return "\n".join(rows)
