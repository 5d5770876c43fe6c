"""Operators that work on each element alone, with numpy's broadcasting."""

from __future__ import annotations

from onecard.rules.call import Call
from onecard.rules.registry import row
from onecard.rules.rule import Form


def elementwise(call: Call) -> str:
    """All operands and results share their dims: ``"..., ... -> ..."``."""
    return f"{', '.join(['...'] * len(call.operands))} -> {', '.join(['...'] * len(call.results))}"


row("""relu gelu sigmoid tanh exp log sqrt rsqrt reciprocal abs pow clamp where eq ne lt le gt ge
    threshold_backward gelu_backward""")(elementwise)


@row("add sub")
def _add(call: Call) -> Form:
    return Form(elementwise(call), linear="self + other" if len(call.operands) == 2 else "")


@row("mul")
def _mul(call: Call) -> Form:
    return Form(elementwise(call), linear="self * other")


@row("div.Tensor div.Scalar")
def _div(call: Call) -> Form:
    return Form(elementwise(call), linear="self")


row("neg", "... -> ...", linear="self")
row("clone detach alias lift_fresh contiguous", "... -> ...", moves=True)
