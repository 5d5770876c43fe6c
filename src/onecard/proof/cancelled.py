"""Gradients that are zero but for rounding, as that of a bias ahead of a batch norm: what they are sums of cancels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onecard.proof.results import Result
from onecard.proof.seen import Value, Watched
from onecard.proof.whole import FLOOR, scale_of


def cancelled(one: Watched) -> dict[str, float]:
    """One card's gradients that are nothing beside what they are sums of, with the largest number of that.

    In float64 what is left of such a sum is below 1e-12 of a summand. So in float32 all of it is rounding, another one on
    other ranks, and as large as itself: only beside the summands does its size say anything.

    Args:
        one: what one card computed, in float64.
    """
    found = {}
    for held in one.held:
        if held.kind == "gradient" and held.value.made is not None:
            most = _summands(one, held.value)
            if most > 0.0 and scale_of(held.value.local) <= FLOOR * most:
                found[f"the gradient of {held.name} in step {held.step + 1}"] = most
    return found


def _summands(one: Watched, value: Value) -> float:
    """The largest number of the gradients that a value is summed from, through copies, factors and sums of its own size."""
    waiting, seen, most = [value.made], {value.made}, 0.0
    while waiting:
        number, i = waiting.pop() or (0, 0)
        for source in one.entries[number].inputs[i]:
            entry = one.entries[source[0]]
            x = entry.values[source[1]].local
            if x.numel() > value.local.numel() and entry.phase == "backward":
                most = max(most, scale_of(x))
            elif x.numel() == value.local.numel() and source not in seen:
                waiting.append(source)
            seen.add(source)
    return most


def apart_from(results: Sequence[Result], summands: Mapping[str, float]) -> tuple[list[Result], str]:
    """Results in a program's own precision that say how much rounding there is, and in words those that are nothing else.

    A parameter with such a gradient is moved by rounding: by Adam, which divides a gradient by its size, as far as others.

    Example:
        >>> import torch
        >>> has, want = {0: torch.tensor(3e-9)}, {0: torch.tensor(0.0)}
        >>> x = Result("the gradient of 0.bias in step 1", "gradient", 1.5, (), "", has, want)
        >>> print(apart_from([x], {x.what: 0.02})[1])
        zero but for rounding: the gradient of 0.bias in step 1; ranks and one card are 3.0e-09 apart, of summands up to 2.0e-02
    """
    names = {what.removeprefix("the gradient of ").rpartition(" in step ")[0] for what in summands}
    mine = [result for result in results if result.what in summands]
    others = [x for x in results if x.what not in summands and not (x.kind == "final" and x.what in names)]
    if not mine:
        return others, ""
    worst = max(mine, key=lambda result: _off(result) / summands[result.what])
    listed = ", ".join(result.what for result in mine[:3]) + (f" and {len(mine) - 3} more" if len(mine) > 3 else "")
    return others, (
        f"zero but for rounding: {listed}; ranks and one card are {_off(worst):.1e} apart, "
        f"of summands up to {summands[worst.what]:.1e}"
    )


def _off(result: Result) -> float:
    """How far ranks are from one card, absolutely."""
    local, right = result.local or {}, result.right or {}
    return max(
        (float((x.double() - right[rank].double()).abs().max()) for rank, x in local.items() if x.numel()), default=0.0
    )
