"""A plan as a page that a person reads, and two of them side by side. Pure."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from typing import Any

from onecard.pipeline.schedule.modes import known

MEANS = {
    "dp": "ranks of data parallelism",
    "tp": "ranks of tensor parallelism",
    "cp": "ranks of context parallelism",
    "pp": "ranks of a pipeline",
    "ep": "ranks of expert parallelism",
    "per_host": "ranks on a host",
    "placements": "placements by name",
    "outputs": "outputs of modules by name",
    "sequence_parallel": "sequence divided between the layers that tp divides",
    "schedule": "order of the pipeline's work",
    "virtual": "stages of each rank",
    "stages": "blocks of each stage",
    "microbatch": "sequences of a microbatch",
    "microbatches": "microbatches of a step",
    "zero": "what of the training state dp divides",
    "replicas": "copies of the training state",
    "recompute": "what backward computes again",
    "recompute_blocks": "of so many blocks of a stage",
    "parameters": "dtype of parameters",
    "gradients": "dtype of gradients",
    "states": "dtype of the optimizer's states",
    "compute": "dtype of products",
    "master": "copy of the parameters in float32",
    "offload": "states in the host's memory",
    "compiled": "kernels fused",
    "overlap": "messages along dp beside computation",
    "overlap_tp": "messages along tp beside products",
    "overlap_pp": "stages go on while they send",
    "partial_sends": "what stages send, a part from each rank of tp",
}
_ZERO = ("nothing", "optimizer states", "optimizer states, gradients", "optimizer states, gradients, parameters")
_AGAIN = {
    "none": "nothing",
    "selective": "the attention's core",
    "operators": "cheap operators and every second product",
    "full": "whole blocks",
}


def page(plan: Any) -> str:
    """The whole plan, a line for each thing that matters."""
    axes = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(plan, axis) > 1)
    title = f"Plan for {_ranks(plan.world)}" + (f": {axes}" if axes else "") + _hosts(plan)
    lines = [("batch", _batch(plan))]
    if plan.tp > 1 or plan.cp > 1:
        lines += [("within layers", _within(plan))]
    if plan.pp > 1:
        lines += [("pipeline", _pipeline(plan))]
    if plan.ep > 1:
        lines += [("experts", f"over {plan.ep} ranks of dp")]
    lines += [("kept", _kept(plan))]
    if plan.zero or plan.offload:
        lines += [("states", _states(plan))]
    if plan.recompute != "none":
        of = f" of {plan.recompute_blocks} blocks of a stage" if plan.recompute_blocks else ""
        lines += [("recompute", f"backward computes {_AGAIN[plan.recompute]} again{of}")]
    lines += [("computes", _computes(plan))]
    lines += [(f"{pattern}", placements) for pattern, placements in plan.placements]
    lines += [(f"{pattern}", f"its output lies {placements}") for pattern, placements in plan.outputs]
    wide = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:<{wide}}  {text}" for name, text in lines)])


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count > 1)}"


def _hosts(plan: Any) -> str:
    if not plan.per_host or plan.world <= plan.per_host:
        return ", on one host" if plan.world > 1 else ""
    whole, left = divmod(plan.world, plan.per_host)
    return f", on {whole + bool(left)} hosts of {plan.per_host}" + (f" (the last has {left})" if left else "")


def _batch(plan: Any) -> str:
    parts = f"{plan.dp} (dp) x {plan.microbatch} (microbatch) x {plan.microbatches} (microbatches)"
    return f"{plan.batch:,} sequence{'s' * (plan.batch > 1)} a step = {parts}"


def _within(plan: Any) -> str:
    parts = []
    if plan.tp > 1:
        way = "sequence parallel" if plan.sequence_parallel else "the sequence whole between layers"
        way = "activations between layers as the outputs below" if plan.outputs else way
        parts += [f"tensors over {plan.tp} ranks, {way}"]
    if plan.cp > 1:
        parts += [f"attention over {plan.cp} parts of a sequence"]
    return "; ".join(parts)


def _pipeline(plan: Any) -> str:
    stages = (f"{plan.virtual} on each rank, " if plan.virtual > 1 else "") + f"{plan.pp * plan.virtual} stages"
    blocks = f" of {_runs(plan.stages)} blocks" if plan.stages else ", as equal as can be"
    sends = "" if plan.overlap_pp else "; stages wait for what they send"
    sends += "; each rank of tp sends a part" if plan.partial_sends and plan.tp > 1 else ""
    return f"{known(plan.schedule)}, {stages}{blocks}{sends}"


def _runs(numbers: tuple[int, ...]) -> str:
    """Numbers with how often they follow each other.

    Example:
        >>> _runs((7, 8, 8, 8, 7))
        '7, 3 x 8, 7'
    """
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ", ".join(f"{count} x {number}" if count > 1 else str(number) for number, count in runs)


def _kept(plan: Any) -> str:
    parts = f"{plan.parameters} parameters, {plan.gradients} gradients, {plan.states} states of the optimizer"
    return parts + ", a float32 copy of the parameters" * plan.master


def _states(plan: Any) -> str:
    parts = []
    if plan.zero:
        copies = f", in {plan.replicas} copies" if plan.replicas > 1 else ""
        parts += [f"ZeRO {plan.zero} divides {_ZERO[plan.zero]} over {_ranks(plan.dp // plan.replicas)}{copies}"]
    if plan.offload:
        parts += ["states of the optimizer lie in the host's memory"]
    return "; ".join(parts)


def _computes(plan: Any) -> str:
    fused = "kernels fused" if plan.compiled else "kernel by kernel"
    beside = "beside" if plan.overlap else "before and after"
    along_tp = "; those along tp beside products" if plan.overlap_tp and plan.tp > 1 else ""
    return f"in {plan.compute}, {fused}; messages along dp run {beside} computation{along_tp}"


def difference(plan: Any, other: Any) -> tuple[str, ...]:
    """The fields that differ, in words."""
    lines = []
    for field in fields(plan):
        mine, theirs = getattr(plan, field.name), getattr(other, field.name)
        if mine != theirs:
            lines += [f"{field.name}: {_value(mine)} -> {_value(theirs)} ({MEANS[field.name]})"]
    for name, means in (("world", "ranks"), ("batch", "sequences of a step")):
        if getattr(plan, name) != getattr(other, name):
            lines += [f"so {name}: {getattr(plan, name):,} -> {getattr(other, name):,} ({means})"]
    return tuple(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(item if isinstance(item, str) else str(item) for item in value) or "none said"
    return str(value)
