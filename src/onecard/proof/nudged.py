"""One card's program once more, its parameters an ulp apart: what moves by that as far as the ranks are off is rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from onecard.errors import ProofError
from onecard.proof.begun import Begun
from onecard.proof.report import Result
from onecard.proof.results import BEGIN, compare
from onecard.proof.running import Case
from onecard.proof.seen import Watched
from onecard.proof.words import ranks_of

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


@dataclass(frozen=True, slots=True)
class Excused:
    """What wrong results are.

    Attributes:
        wrong: those that are no rounding; rounded: the others, in words.
        begun: what begins with other values than on one card, or is drawn by nobody's seed, in words.
    """

    wrong: tuple[Result, ...]
    rounded: str = ""
    begun: str = ""


def told_apart(case: Case, one: Watched, ranks: Sequence[Watched], wrong: Sequence[Result], bound: float) -> Excused:
    """Wrong results that are no rounding apart from those that are.

    Adam divides a gradient by its own size. One that is zero but for rounding becomes a step of a number's size, another one on
    other ranks. So no bound on results tells it from a fault; what one card's program does to an ulp tells it, if it does the
    same each time: one that draws what nobody seeds is moved by that.
    """
    begun = _begun(one, ranks, wrong)
    try:
        again = replace(case, nudged=Nudged).one(in_float64=True, keep=False)
    except ProofError:
        return Excused(tuple(wrong), begun=begun)
    moved = {result.what: result.off for result in compare([again], one, bound)[0]}
    left = tuple(result for result in wrong if not result.off <= TIMES * moved.get(result.what, 0.0))
    if len(left) == len(wrong):
        return Excused(left, begun=begun)
    drawn = [x.what for x in compare([case.one(in_float64=True, keep=False)], one, bound)[0] if not x.off <= bound]
    if drawn:
        return Excused(
            tuple(wrong),
            begun=f"one card's own run gives other numbers each time, from {drawn[0]} on: seed what the program draws, as in "
            "numpy.random.default_rng(seed)",
        )
    names = ", ".join(result.what for result in wrong if result not in left)
    rounded = f"rounding: one card's own move as far when its parameters begin an ulp apart: {names}"
    return Excused(left, rounded, begun)


def _begun(one: Watched, ranks: Sequence[Watched], wrong: Sequence[Result]) -> str:
    """Parameters that begin with other values than on one card, in words; a model that is first called later has none."""
    first = {held.name for each in (one, *ranks) for held in each.held if held.kind == "initial" and not held.step}
    named = {x.what.removeprefix(BEGIN): x for x in wrong if x.kind == "initial"}
    names = [name for name in named if name in first]
    if not names:
        return ""
    where = ranks_of(sorted({rank for name in names for rank in named[name].ranks}))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    begin = "begins with another value" if len(names) == 1 else "begin with other values"
    return (
        f"{', '.join(names[:SHOWN])}{more} {begin} on {where}: seed every rank alike (torch, numpy, random) before the model is "
        "made, draw what is cut as a whole, or broadcast it"
    )


SHOWN = 4
