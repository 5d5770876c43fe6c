"""Plans and their prices in words, as a list of them has it. Pure."""

from __future__ import annotations

from onecard.planning.job import JobCost, seconds_in_words
from onecard.planning.plan import Plan


def in_words(plan: Plan) -> str:
    """A plan in one line.

    Example:
        >>> in_words(Plan(dp=64, tp=2, zero=1, microbatches=4, sequence_parallel=True))
        'dp=64 tp=2, ZeRO-1, 4 microbatches of 1'
        >>> in_words(Plan())
        'one rank'
    """
    parts = [
        " ".join(f"{a}={getattr(plan, a)}" for a in ("dp", "cp", "tp", "pp") if getattr(plan, a) > 1) or "one rank"
    ]
    if plan.pp > 1:
        parts += [plan.schedule + (f" of {plan.virtual} stages a rank" if plan.virtual > 1 else "")]
    if plan.zero:
        parts += [f"ZeRO-{plan.zero}" + (f" in {plan.replicas} copies" if plan.replicas > 1 else "")]
    if plan.microbatches > 1:
        parts += [f"{plan.microbatches} microbatches of {plan.microbatch}"]
    if plan.recompute != "none":
        of = f" of {plan.recompute_blocks} blocks" if plan.recompute_blocks else ""
        parts += [f"recompute={plan.recompute}{of}"]
    return ", ".join(parts)


def largest(cost: JobCost) -> str:
    """What takes most of the fullest rank's memory."""
    if cost.needs > cost.peak:
        return "parameters, their gradients and states, and what the optimizer computes for the largest one"
    memory = max(cost.ranks, key=lambda rank: rank.peak).memory
    name = max(memory, key=lambda name: memory[name])
    return f"{memory[name] / max(1, sum(memory.values())):.0%} of it {name}"


def more_in_words(cost: JobCost, best: JobCost, why: bool = False) -> str:
    """How much slower a plan is; ``why``: and what for."""
    more = cost.seconds / best.seconds - 1
    if abs(more) < 0.005:
        return "as fast"
    if more < 0:
        return f"{-more:.0%} faster"
    text = f"{more:.0%} slower" if more < 10 else f"{cost.seconds / best.seconds:,.0f} times as long"
    names = cost.terms.keys() | best.terms.keys()
    adds = {name: cost.terms.get(name, 0.0) - best.terms.get(name, 0.0) for name in sorted(names)}
    name = max(adds, key=lambda name: adds[name])
    return f"{text} ({seconds_in_words(adds[name])} more {name})" if why and adds[name] > 0 else text
