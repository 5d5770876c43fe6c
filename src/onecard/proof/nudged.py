"""One card's program once more, its parameters an ulp apart: what moves by that as far as the ranks are off is rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from onecard.errors import ProofError
from onecard.proof.begun import Begun
from onecard.proof.report import Result
from onecard.proof.results import compare
from onecard.proof.running import Case
from onecard.proof.seen import Watched

ULP = torch.finfo(torch.float64).eps
TIMES = 10.0  # that the ranks may be off, of what an ulp moves: they round in more places


class Nudged:
    """As ``Begun``, with every parameter multiplied by one ulp more or less than one."""

    def __init__(self, begun: Begun | None) -> None:
        self.begun = begun

    def model(self, module: nn.Module) -> None:
        """Before its first call."""
        if self.begun is not None:
            self.begun.model(module)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.mul_(1 + ULP if number % 2 else 1 - ULP)

    def optimizer(self, optimizer: Optimizer) -> None:
        """Before its first step."""
        if self.begun is not None:
            self.begun.optimizer(optimizer)


def rounding_apart(case: Case, one: Watched, wrong: Sequence[Result], bound: float) -> tuple[tuple[Result, ...], str]:
    """Those of wrong results that are no rounding, and the others in words.

    Adam divides a gradient by its own size. One that is zero but for rounding becomes a step of a number's size, another one on
    other ranks. So no bound on results tells it from a fault; what one card's program does to an ulp tells it.
    """
    try:
        again = replace(case, nudged=Nudged).one(in_float64=True, keep=False)
    except ProofError:
        return tuple(wrong), ""
    moved = {result.what: result.off for result in compare([again], one, bound)[0]}
    left = tuple(result for result in wrong if not result.off <= TIMES * moved.get(result.what, 0.0))
    if len(left) == len(wrong):
        return left, ""
    names = ", ".join(result.what for result in wrong if result not in left)
    return left, f"rounding: one card's own move as far when its parameters begin an ulp apart: {names}"
