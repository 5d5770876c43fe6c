"""What a row's ``local`` hook sees and may change: the call as one rank will run it. Built once for each cached decision."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from onecard.place.parts import axes_of, span
from onecard.rules.call import Call
from onecard.rules.decide import Decision
from onecard.rules.rule import Bound


class Local:
    """One rank's view of a decided call.

    Attributes:
        call: the whole call (meta tensors, static arguments).
        replace: static arguments to change, by schema name; set them with ``set``.
        run: what to run on the local tensors in place of the operator (same arguments), or None.
        copies: ``run`` copies where one card has a view, so that writing to the result would miss the operand.
    """

    __slots__ = ("bound", "call", "coordinate", "copies", "decision", "replace", "run")

    def __init__(self, call: Call, bound: Bound, decision: Decision, coordinate: tuple[int, ...]) -> None:
        self.call, self.bound, self.decision, self.coordinate = call, bound, decision, coordinate
        self.replace: dict[str, Any] = {}
        self.run: Callable[..., Any] | None = None
        self.copies = False

    def set(self, name: str, value: Any) -> None:
        """Give a static argument another value on this rank."""
        self.replace[name] = value

    def cut(self, name: str) -> bool:
        """Whether any axis cuts a factor."""
        factors = self.bound.factors(name)
        return any(use.factor in factors for use in self.decision.uses)

    def span(self, name: str) -> tuple[int, int]:
        """Offset and length of this rank's part of a factor; the whole of it if it is not cut. See ``Row.positions``."""
        factor = self.bound.factor(name)
        return (0, 1) if factor is None else self._span(factor)

    def length(self, name: str) -> int:
        """How many indices of a factor this rank has, whichever they are."""
        return prod(self._span(factor)[1] for factor in self.bound.factors(name))

    def lengths(self) -> list[int]:
        """How many indices of each factor this rank has."""
        return [self._span(factor)[1] for factor in range(len(self.bound.sizes))]

    def _span(self, factor: int) -> tuple[int, int]:
        return span(self.bound.sizes[factor], self._axes(factor), self.decision.operands[0].mesh, self.coordinate)

    def _axes(self, factor: int) -> tuple[int, ...]:
        for dims, layout in zip(
            (*self.bound.operands, *self.bound.results), (*self.decision.operands, *self.decision.results), strict=True
        ):
            for dim, axes in zip(dims, layout.dims, strict=True):
                mine = tuple(a for a in axes_of(axes) if self.decision.uses[a].factor == factor)
                if factor in dim and mine:
                    return mine
        return ()

    def size(self, name: str) -> int:
        """The whole size of a factor."""
        return prod(self.bound.sizes[factor] for factor in self.bound.factors(name))

    def operand_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self.decision.operands[index].local_shape(self.call.operands[index].shape, self.coordinate)

    def operand_offset(self, index: int = 0) -> tuple[int, ...]:
        """Where the local operand begins in the whole."""
        return self.decision.operands[index].local_offset(self.call.operands[index].shape, self.coordinate)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""
        return self.decision.results[index].local_shape(self.call.results[index].shape, self.coordinate)

    def result_offset(self, index: int = 0) -> tuple[int, ...]:
        """Where the local result begins in the whole."""
        return self.decision.results[index].local_offset(self.call.results[index].shape, self.coordinate)
