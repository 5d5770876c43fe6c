"""How a tensor and its gradient lie along one mesh axis, and what it costs to change that. Pure.

A tensor that is whole has a gradient that is whole, or summands of one: an operator whose work is divided gives each rank a part
of the gradient of what all of them read. So there are four kinds, not three, and a change has two prices: forward, and backward.

Source: the conjugate operators of Megatron-LM (Shoeybi et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from onecard.planning.lines import AxisLine

WHOLE, READ, PENDING, FIRST = 0, 1, 2, 3
"""Whole, as its gradient; whole with a pending gradient; pending with a whole gradient; ``FIRST + d``: dim d is divided."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of changes along one axis.

    Attributes:
        line: its ranks; often: how often a step does each (microbatches).
    """

    line: AxisLine
    often: int = 1

    def change(self, nbytes: int, old: int, new: int, trained: bool) -> float:
        """Seconds in which a tensor of so many bytes comes to lie otherwise, its gradient included if it has one."""
        if old == new:
            return 0.0
        forward = _message(_forward(old), _forward(new))
        backward = _message(_backward(new), _backward(old)) if trained else ""
        if forward == "never" or backward == "never":
            return NEVER
        return self.often * (self._seconds(forward, nbytes) + self._seconds(backward, nbytes))

    def _seconds(self, kind: str, nbytes: int) -> float:
        if not kind:
            return 0.0
        given = nbytes if kind in ("all_reduce", "reduce_scatter") else -(-nbytes // self.line.count)
        return self.line.seconds(kind, given)


def _forward(kind: int) -> int:
    """How the tensor lies: -1 whole, -2 pending, else the dim that is divided."""
    return {WHOLE: -1, READ: -1, PENDING: -2}.get(kind, kind - FIRST)


def _backward(kind: int) -> int:
    """How its gradient lies."""
    return {WHOLE: -1, READ: -2, PENDING: -1}.get(kind, kind - FIRST)


@lru_cache
def _message(old: int, new: int) -> str:
    """The collective between two ways to lie."""
    if old == new or old == -1:
        return ""
    if old == -2:
        return "all_reduce" if new == -1 else "reduce_scatter"
    if new == -1:
        return "all_gather"
    return "never" if new == -2 else "all_to_all"
