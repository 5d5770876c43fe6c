"""The numbers in a step that may be counts of its rows: which of them grow with the batch, as a second look tells."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onecard.comm.base.state import faked
from onecard.rules.call import Call
from onecard.static.passes.dependence import ADDS, ALIKE, COUNT, ROWS, Kind, Verdict, may_count, told
from onecard.tensor.dist_tensor import DistTensor

_POWERS = (0, 1, -1, 2, -2, 3, -3)
SCALES = ("mul", "div")
"""Whose numbers may follow the rows."""
TERMS = {
    "add": ("other",), "sub": ("other",), "rsub": ("other",), "clamp": ("min", "max"), "clamp_min": ("min",),
    "clamp_max": ("max",),
}  # fmt: skip
"""Whose numbers are no factors."""


class RowNumbers:
    """What a step that runs on ``rows`` rows multiplies, divides by and adds.

    Args:
        before: what a run on a k-th of the rows has shown, so that numbers which follow the rows are known by comparison.
    """

    def __init__(self, rows: int, before: Verdict | None, k: int) -> None:
        self.rows, self.before, self.k = rows, before, k
        self.lengths = {rows}  # and those of parts on a rank
        self.verdict = Verdict()
        self.number: float | None = None
        self.follows = False  # what is added, or bounds, is another number for the whole batch

    def look(self, call: Call, given: list[Tensor], kinds: list[Kind | None]) -> None:
        """A call begins: by which number it multiplies or divides."""
        self.number, self.follows = None, False
        if call.schema.functional == "slice" and self.before is None:
            self.verdict.unsure |= self._ends_with_rows(call, kinds[0])
        if call.schema.functional in SCALES:
            self.number = _number(call.values.get("other"), given, kinds, self.rows == 1)
            self.verdict.numbers.append(self.number)
        for name in TERMS.get(call.schema.functional, ()):
            number = _number(call.values.get(name), given, kinds, self.rows == 1)
            self.verdict.terms.append(number)
            if number is not None and any(map(told, kinds)):
                self._term(number, any(k is not None and k.how in (ADDS, COUNT) for k in kinds))

    def _term(self, number: float, of_sums: bool) -> None:
        """What is added, or bounds: it may be the length of the microbatch."""
        at = len(self.verdict.terms) - 1
        if self.before is None:
            self.verdict.unsure |= of_sums and may_count(number, self.rows)
            self.verdict.curious |= of_sums and number > 1
        elif at < len(self.before.terms) and self.before.terms[at]:
            self.follows |= number != self.before.terms[at]

    def _ends_with_rows(self, call: Call, kind: Kind | None) -> bool:
        """Whether ``x[:n]`` takes all rows here, and may take some of the whole batch's: by a number, not to the end."""
        dim, end = call.values.get("dim", 0) % max(call.self.dim(), 1), call.values.get("end")
        mine = kind is not None and kind.how == ROWS and kind.dim == dim
        return mine and end is not None and call.self.shape[dim] <= end < sys.maxsize

    def _degree(self, call: Call, x: Tensor | None = None) -> int:
        """1 or -1 if the call multiplies by a number that follows the rows, or divides by it. ``x``: rows, if it is of them."""
        if not self.number:
            return 0
        if self.before is None:
            inverse = 1 / self.number if self.number < 1 else self.number
            self.verdict.unsure |= self._may_follow(inverse, x)
            return 0
        at = len(self.verdict.numbers) - 1
        first = self.before.numbers[at] if at < len(self.before.numbers) else None
        first = self.number if first is None else first
        times = round(self.number / first, 9) if first else 1
        follows = next((p for p in _POWERS if round(float(self.k) ** p, 9) == times), 0)
        return follows * (1 if call.schema.functional == "mul" else -1)

    def _may_follow(self, number: float, x: Tensor | None) -> bool:
        """Whether a number may count rows. In activations most numbers do not: there it has to be rows, or elements."""
        if x is None or x.dim() == 1:
            return may_count(number, self.rows)
        sizes = (1, *x.shape, x.numel() / self.rows)
        return any(abs(number - self.rows * n) < 1e-9 * number for n in sizes)


def _number(
    number: Any, given: Sequence[Tensor], kinds: Sequence[Kind | None], any_tensor: bool = False
) -> float | None:
    """The size of a number among the arguments of a call: Python's, or a tensor's that was made of one.

    ``any_tensor``: of any tensor of one element: nothing is said of those of a single row, but by the look at the whole batch.
    """
    if isinstance(number, Tensor):
        at = next((i for i, k in enumerate(kinds) if k is not None and k.how == ALIKE), -1 if any_tensor else None)
        number = value_of(given[at]) if at is not None else None
    return abs(float(number)) if isinstance(number, int | float) and not isinstance(number, bool) else None


def value_of(x: Tensor) -> float | None:
    """What a tensor of one element holds, if it has data."""
    local = x._local if isinstance(x, DistTensor) else x
    return float(local) if x.numel() == 1 and not x.is_complex() and is_real(local) else None


def is_real(x: Tensor) -> bool:
    return not faked.here and type(x) is Tensor and not x.is_meta
