"""A strategy's fields and a plan's: the one table between them. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onecard.errors import StrategyError
from onecard.planning.plan import Plan, Recompute

REPEATED = "repeated"
"""Of ``recompute.checkpoints``: the model's repeated layers."""

_HALF = ("bfloat16", "float16")


def config_of(plan: Plan) -> dict[str, Any]:
    """A strategy's fields as a plan has them.

    Raises:
        StrategyError: the plan asks for what no field says.
    """
    for field, asks, why in _NO_FIELD:
        if asks(plan):
            raise StrategyError(f"Strategy.of_plan: {field}={getattr(plan, field)!r}: {why}", field)
    merges = plan.pp == 1 and plan.microbatches > 1
    return {
        "sharding": {
            "enable": plan.zero > 0, "stage": plan.zero or 1, "offload": plan.offload,
            "degree": plan.dp // plan.replicas if plan.zero and plan.replicas > 1 else -1,
        },
        "pipeline": {
            "enable": plan.pp > 1, "schedule_mode": plan.schedule, "vpp_degree": plan.virtual,
            "degree": plan.pp if plan.pp > 1 else -1,
            "micro_batch_size": plan.microbatch, "accumulate_steps": 1 if merges else plan.microbatches,
        },
        "recompute": {
            "enable": plan.recompute != "none", "checkpoints": [REPEATED] if plan.recompute == "full" else [],
        },
        "amp": _amp_of(plan),
        "gradient_merge": {"enable": merges, "k_steps": plan.microbatches if merges else 1},
        "fused_passes": {"enable": plan.compiled},
    }  # fmt: skip


def to_plan(strategy: Any, base: Plan) -> Plan:
    """A plan with a strategy's fields in place of its own."""
    zero, pipe, again, merge = strategy.sharding, strategy.pipeline, strategy.recompute, strategy.gradient_merge
    if pipe.enable and pipe.degree == -1 and base.pp == 1:
        raise StrategyError(
            "Strategy.to_plan: pipeline.degree=-1: how many ranks are one behind the other? Set pipeline.degree, or give a plan "
            "that says it: strategy.to_plan(Plan(pp=2))",
            "pipeline.degree",
        )
    if zero.enable and zero.degree != -1 and base.dp % zero.degree:
        raise StrategyError(
            f"Strategy.to_plan: sharding.degree={zero.degree}: does not divide dp={base.dp} of the plan: "
            f"strategy.to_plan(Plan(dp={zero.degree}))",
            "sharding.degree",
        )
    recompute: Recompute = "none" if not again.enable else "full" if again.checkpoints else "operators"
    return replace(
        base,
        zero=zero.stage if zero.enable else 0,
        replicas=base.dp // zero.degree if zero.enable and zero.degree != -1 else 1,
        offload=zero.enable and zero.offload,
        pp=(base.pp if pipe.degree == -1 else pipe.degree) if pipe.enable else 1,
        schedule=pipe.schedule_mode,
        virtual=pipe.vpp_degree if pipe.enable else 1,
        microbatch=pipe.micro_batch_size,
        microbatches=merge.k_steps if merge.enable else pipe.accumulate_steps,
        recompute=recompute,
        compiled=strategy.fused_passes.enable,
        **_dtypes_of(strategy.amp, base),
    )


def _amp_of(plan: Plan) -> dict[str, Any]:
    if plan.parameters in _HALF:
        return {"enable": True, "dtype": plan.parameters, "level": "O2"}
    return {"enable": plan.compute in _HALF} | ({"dtype": plan.compute} if plan.compute in _HALF else {})


def _dtypes_of(amp: Any, base: Plan) -> dict[str, Any]:
    if not amp.enable:
        return {"parameters": "float32", "compute": "float32", "master": False}
    if amp.level == "O1":
        return {"parameters": "float32", "compute": amp.dtype, "master": False}
    return {"parameters": amp.dtype, "compute": amp.dtype, "master": True}


_MARKS = "marks of the model say where parameters lie: oc.shard_layer(model, mesh, shard_fn)"
_NO_FIELD = [
    ("cp", lambda p: p.cp > 1, f"context parallelism is no field of a strategy; {_MARKS}"),
    ("recompute", lambda p: p.recompute == "selective", "scaled_dot_product_attention keeps nothing of its core: 'none' is the "
     "same with it; 'operators' computes what is cheap again"),
    ("recompute_blocks", lambda p: p.recompute_blocks, "name the blocks: strategy.recompute.checkpoints = [...]"),
    ("stages", lambda p: p.stages, "name the modules at which stages begin: strategy.pipeline.at = [...]"),
    ("parameters", lambda p: p.parameters in _HALF and not p.master, "16-bit parameters without float32 copies: "
     "model.to(dtype), and a strategy without amp; amp.level='O2' keeps copies"),
    ("parameters", lambda p: p.parameters not in (*_HALF, "float32"), "want float32, bfloat16 or float16"),
    ("compute", lambda p: p.compute not in (*_HALF, "float32"), "want float32, bfloat16 or float16"),
    ("compute", lambda p: p.parameters in _HALF and p.compute != p.parameters, "16-bit parameters compute in their own dtype"),
    ("gradients", lambda p: p.gradients != "float32" and p.parameters == "float32", "gradients of float32 parameters are "
     "float32"),
    ("states", lambda p: p.states != "float32", "optimizers keep float32 states"),
]  # fmt: skip
