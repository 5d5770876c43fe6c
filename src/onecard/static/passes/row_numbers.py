"""The numbers in a step that may be counts of its rows: which of them grow with the batch, as a second look tells."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base import record
from onecard.comm.base.state import faked
from onecard.rules.call import Call
from onecard.rules.registry import bound_of
from onecard.static.passes.dependence import (
    ADDS,
    ALIKE,
    COMPARISONS,
    COUNT,
    ROWS,
    AddedNumber,
    Kind,
    Verdict,
    may_count,
    told,
)
from onecard.tensor.dist_tensor import DistTensor

_POWERS = (0, 1, -1, 2, -2, 3, -3)
SCALES = ("mul", "div")
"""Whose numbers may follow the rows."""
TERMS = {
    "add": ("other",), "sub": ("other",), "rsub": ("other",), "clamp": ("min", "max"), "clamp_min": ("min",),
    "clamp_max": ("max",),
}  # fmt: skip
"""Whose numbers are no factors."""
_NUMBERS = ("exponent", "value", "alpha", "beta", "weight", "fill_value")
_FEW = 4096  # elements of a tensor that are compared one by one; of more their sum
Ours = Sequence[bool]  # of each operand, whether the step has made it of numbers and shapes alone


class RowNumbers:
    """What a step that runs on ``rows`` rows multiplies, divides by and adds.

    Args:
        before: what a run on a k-th of the rows has shown, so that numbers which follow the rows are known by comparison.
    """

    def __init__(self, rows: int, before: Verdict | None, k: int) -> None:
        self.rows, self.before, self.k = rows, before, k
        self.lengths = {rows}  # and those of parts on a rank
        self.verdict = Verdict()
        self._constant = set[AddedNumber]()  # numbers that are added and do not grow
        self.number: float | None = None
        self.first: float | None = None  # in the first look
        self.follows = False  # a number is another one for the whole batch, and no multiple by its length
        self.grows = False  # one that is added to counts is as many times as large as the batch
        self.strays = list[tuple[tuple[str, str], int]]()  # the numbers and tensors that are others than before

    def look(self, call: Call, given: list[Tensor], kinds: list[Kind | None], ours: Ours) -> None:
        """A call begins: which numbers it is given, of its own or in tensors in which there is nothing of the batch."""
        self.number, self.first, self.follows, self.grows = None, None, False, False
        if call.schema.functional == "slice" and self.before is None:
            self.verdict.unsure |= self._ends_with_rows(call, kinds[0])
        at = None
        if call.schema.functional in SCALES:
            number, at = _number(call.values.get("other"), given, kinds, ours)
            self.number, self.first = number, self._note(call, "scale", number)
            if self.before is not None and self.first is None:
                at = None  # it is compared as a tensor, as it was then
            self.follows = None not in (self.first, number) and self._power() is None
        for name in TERMS.get(call.schema.functional, ()):
            number, at = _number(call.values.get(name), given, kinds, ours)
            self._term(call, number, self._note(call, name, number), kinds)
        if any(map(told, kinds)):
            self._others(call, given, kinds, ours, at)

    def _note(self, call: Call, what: str, value: Any) -> Any:
        """The same as ``_first``, of a value that a microbatch takes from the whole batch where it is another one there."""
        found = self._first(call, what, value)
        if found is not None and value is not None and not _same(found, value):
            key = _key(call, what)
            self.strays.append((key, len(self.verdict.noted[key]) - 1))
        return found

    def _first(self, call: Call, what: str, value: Any) -> Any:
        """What the first look had in place of a value: in the same call of the same line; None if it had none."""
        key = _key(call, what)
        seen = self.verdict.noted.setdefault(key, [])
        seen.append(value)
        then = self.before.noted.get(key, ()) if self.before is not None else ()
        return then[len(seen) - 1] if len(seen) <= len(then) else None

    def _term(self, call: Call, number: float | None, first: float | None, kinds: list[Kind | None]) -> None:
        """What is added, or bounds: it may be the length of the microbatch."""
        sums, name = [k for k in kinds if k is not None and k.how in (ADDS, COUNT)], call.schema.functional
        if number is not None and self.before is None:
            self.verdict.unsure |= bool(sums) and may_count(number, self.rows)
        if number is None or first is None:
            return
        term = AddedNumber(name, record.user_line(), first)
        if number == first:
            self._constant.add(term)
            self.follows |= term in self.verdict.terms
            return
        counts = len(call.operands) == len(sums) == 1 and sums[0].degree == 1 and not (sums[0].learns or sums[0].length)
        counts = counts and name in ("add", "sub", "rsub") and term not in self._constant
        if counts and number == first * self.k:
            self.grows = True
            self.verdict.terms.add(term)
        else:
            self.follows = True

    def _others(self, call: Call, given: list[Tensor], kinds: list[Kind | None], ours: Ours, scale: int | None) -> None:
        """Exponents, weights and the like, and tensors that the step has made: they may be made of the length, too."""
        for name, value in call.values.items():
            counts = name in _NUMBERS or (name == "other" and call.schema.functional in COMPARISONS)
            if call.schema.functional not in SCALES and (type(value) is float or (type(value) is int and counts)):
                first = self._note(call, name, float(value))
                self.follows |= first is not None and first != value
        for i, (x, kind) in enumerate(zip(given, kinds, strict=True)):
            if i != scale and not told(kind) and ours[i] and x.numel():
                first, value = self._note(call, f"operand {i}", seen := _held(x, kind)), seen
                self.follows |= first is not None and _differ(first, value) and not _is_unread(call, i)

    def _power(self) -> int | None:
        """Which power of the rows the call's number follows; None: it follows them in another way."""
        assert self.number is not None and self.first is not None
        if self.number == self.first:
            return 0
        times = round(self.number / self.first, 9) if self.first else 0.0
        return next((p for p in _POWERS if round(float(self.k) ** p, 9) == times), None)

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
        follows = self._power() if self.first is not None else 0
        return (follows or 0) * (1 if call.schema.functional == "mul" else -1)

    def _may_follow(self, number: float, x: Tensor | None) -> bool:
        """Whether a number may count rows. In activations most numbers do not: there it has to be rows, or elements."""
        if x is None or x.dim() == 1:
            return may_count(number, self.rows)
        sizes = (1, *x.shape, x.numel() / self.rows)
        return any(abs(number - self.rows * n) < 1e-9 * number for n in sizes)


def _key(call: Call, what: str) -> tuple[str, str]:
    return f"{call.schema.functional} {what}", record.user_line()


def _number(
    number: Any, given: Sequence[Tensor], kinds: Sequence[Kind | None], ours: Ours
) -> tuple[float | None, int | None]:
    """The size of a number of a call: Python's, or of a tensor that was made of one; and which operand it is."""
    at = None
    if isinstance(number, Tensor):
        fixed = [i for i, k in enumerate(kinds) if not told(k) and (k is None or k.how == ALIKE) and ours[i]]
        alike = [i for i in fixed if (k := kinds[i]) is not None and k.dims is None]
        at = next((i for i in (*alike, *fixed) if i in alike or given[i].numel() == 1), None)
        number = value_of(given[at], alike=at in alike) if at is not None else None
    known = isinstance(number, int | float) and not isinstance(number, bool)
    return (abs(float(number)), at) if known else (None, None)


def _held(x: Tensor, kind: Kind | None) -> tuple[Any, Tensor]:
    """What a tensor holds, as two looks compare it, and in which shape: one that is the same all over, in any.

    Along what it is the same, be it some dims or a part of one, one element stands for all, however many there are.
    """
    if kind is not None and kind.how == ALIKE and kind.dims is None:
        return None, x.flatten()[:1].clone()
    if kind is not None and kind.how == ALIKE:
        at = sorted(d for d in range(x.dim()) if kind.alike(d))
        if kind.size and kind.dim not in at:
            x = x.unflatten(kind.dim, (kind.before, kind.size, -1))
            at = [*(d for d in at if d < kind.dim), kind.dim + 1, *(d + 2 for d in at if d > kind.dim)]
        x = reduce(lambda y, d: y.narrow(d, 0, 1), at, x)
    return tuple(x.shape), x.clone() if x.numel() <= _FEW else x.sum()


def _is_unread(call: Call, operand: int) -> bool:
    """Whether an operand is written to alone."""
    bound = bound_of(call)
    return (call.schema.functional == "copy" and not operand) or (bound is not None and operand in bound.unread)


def _same(one: Any, other: Any) -> bool:
    """Whether two looks have noted the same: numbers, or what tensors hold."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return bool(one[0] == other[0]) and _equal(one[1], other[1])
    return bool(one == other)


def _differ(first: tuple[Any, Tensor], value: tuple[Any, Tensor]) -> bool:
    """Whether two looks hold other elements; of a single row nobody has seen that all are the same."""
    if first[0] == value[0]:
        return not _equal(first[1], value[1])
    one, many = (first[1], value[1]) if first[0] is None else (value[1], first[1].flatten())
    return None in (first[0], value[0]) and _equal(many, many[:1].expand_as(many)) and not _equal(one, many[:1])


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool((a.isnan() & b.isnan() | (a == b)).all())


def rounds(call: Call, operands: Collection[int]) -> bool:
    """Whether floats become whole numbers: the rest of a sum is lost once, those of its summands each."""
    kept = call.operands[0].dtype if call.schema.functional == "copy" else call.values.get("dtype")
    whole = isinstance(kept, torch.dtype) and not (kept.is_floating_point or kept.is_complex)
    return whole and any(call.operands[i].dtype.is_floating_point for i in operands)


def value_of(x: Tensor, alike: bool = False) -> float | None:
    """What a tensor of one element holds, or one that is ``alike`` all over, if it has data."""
    local = x._local if isinstance(x, DistTensor) else x
    if not (alike or x.numel() == 1) or x.is_complex() or not is_real(local) or not local.numel():
        return None
    return float(local.flatten()[0])


def is_real(x: Tensor) -> bool:
    return not faked.here and type(x) is Tensor and not x.is_meta
