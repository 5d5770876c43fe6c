"""Rows in another order than the batch's, as experts take them: sorted by numbers that they have, and put back.

``perm = ids.argsort()`` names the entries of a dim of rows in another order, and ``x[perm]`` lies in it, as does what is made of
it row by row; ``y[perm.argsort()]`` and ``total.index_add(0, perm // k, y)`` are in the batch's again. What all rows give
together (a sum, counts of each number) does not depend on the order. A position in it is nothing that a row says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from onecard.comm.base import record
from onecard.rules.call import Call
from onecard.static.passes.dependence import ADDS, COUNT, ORDER, PLACES, ROWS, Entries, Kind
from onecard.static.passes.row_numbers import is_real, value_of

Known = Sequence[Kind | None]
Found = list[Kind | None] | None


class Orders:
    """What calls make of rows that are sorted, and of the numbers that say how.

    Args:
        rows: how many the step runs on.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self._last = rows, 0
        self._by: Any = WeakIdKeyDictionary()

    def found(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """The kinds of what a call makes; None if it is none of these. ``seen``: operands with data, as far as they are known."""
        use = _USES.get(call.schema.functional)
        return use(self, call, given, kinds, seen) if use is not None and kinds else None

    def _order(self, call: Call, x: Tensor) -> int:
        """The order by a tensor's numbers: the same for whoever sorts it once more."""
        key = x._version, call.values.get("descending"), call.values.get("stable")
        known = self._by.setdefault(x, {})
        if key not in known:
            known[key] = self._last = self._last + 1
        return int(known[key])

    def _sorted(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """Entries of a dim of rows, and their numbers; the numbers that put entries back, of those that sorted them."""
        x, kind = given[0], kinds[0]
        dim = call.values.get("dim", -1) % max(x.dim(), 1)
        if kind is None or kind.dim != dim or x.numel() != x.shape[dim]:  # columns would be sorted each in its own way
            return None
        if kind.how == ROWS:
            entry, order = Entries(kind.order, kind.before, kind.size, x.numel()), self._order(call, x)
            made = replace(kind, before=1, size=x.numel(), order=order)
            index = Kind(ORDER, dim, 1, x.numel(), order=order, points=entry)
            return [made, index] if len(call.results) > 1 else [index]
        if not _is_permutation(kind, x):
            return None
        index = _back(kind, dim)
        return [replace(index, points=None), index] if len(call.results) > 1 else [index]

    def _picked(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """``x[perm]``, ``x[token]``, ``x[token, choice]``."""
        (x, *indices), (kind, *others) = given, kinds
        dim = call.values["dim"] if call.schema.functional == "index_select" else _first_index(call)
        at = others[0] if others else None
        if kind is None or at is None or at.points is None or dim is None:
            return None
        dim %= x.dim()
        if (kind.dim, x.shape[dim]) != (dim, at.points.length) or _entries(kind) != _rows_of(at.points):
            return None
        for index, other in zip(indices[1:], others[1:], strict=True):
            if index.dim() != indices[0].dim() or not _lies_as(other, at):
                return None
        points = Entries(0, 1, self.rows, self.rows) if kind.how == PLACES else kind.points
        how = ORDER if points is not None else kind.how
        return [replace(kind, how=how, dim=dim + at.dim, before=at.before, size=at.size, order=at.order, points=points)]

    def _gathered(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """``x.gather(0, token.expand(-1, width))``: what is repeated of such numbers is the same in all columns."""
        (x, _), (kind, at) = given, kinds
        dim = call.values["dim"] % max(x.dim(), 1)
        if kind is None or kind.how != ROWS or at is None or at.points is None:
            return None
        if not at.dim == kind.dim == dim or x.shape[dim] != at.points.length or _entries(kind) != _rows_of(at.points):
            return None
        return [replace(kind, before=at.before, size=at.size, order=at.order)]

    def _divided(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """``perm // k`` names the row that an entry is of, or the token of a row, ``perm % k`` which of its entries it is."""
        kind, number = kinds[0], call.values.get("other")
        if isinstance(number, Tensor):
            number = value_of(seen[-1])
        points = None if kind is None else kind.points
        if kind is None or points is None or len([k for k in kinds if k is not None and k.points]) > 1 or not number:
            return None
        whole = call.schema.functional == "floor_divide" or call.values.get("rounding_mode") is not None
        each = points.length // points.size
        if points.length % points.size or points.order:
            return None
        inner = points.before == 1 and not each % number
        if call.schema.functional == "remainder":
            if inner:
                return [replace(kind, how=ROWS, points=None)]
            row = Entries(0, 1, points.size, points.size)
            return [replace(kind, points=row)] if (points.before, number) == (each, points.size) else None
        return (
            [replace(kind, points=Entries(0, 1, points.size, int(points.length // number)))]
            if whole and inner
            else None
        )

    def _put(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """``made[perm] = y``: each entry is written."""
        if call.values.get("accumulate") or call.values.get("reduce") or len(given) != 3:
            return None
        (into, index, source), (_, at, kind) = given, kinds
        by_index = call.schema.functional == "index_put"
        dim = _first_index(call) if by_index else call.values["dim"]
        if at is None or dim is None or source.dim() != into.dim() or (by_index and index.dim() > 1):
            return None
        dim %= into.dim()
        lies = at.dim == (dim if index.dim() > 1 else 0) and _is_permutation(at, index)
        if not lies or into.shape[dim] != index.shape[at.dim]:
            return None
        if source.dim() == index.dim() == 1 and is_real(seen[2]) and _counts_up(seen[2]):
            return [_back(at, dim)]
        if kind is None or kind.how != ROWS or kind.dim != dim or _entries(kind) != _entries(at):
            return None
        before, size, order = _rows_of(at.points)
        return [replace(kind, dim=dim, before=before, size=size, order=order)]

    def _added(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """``total.index_add(0, token, made)``: into each row what is its own."""
        if len(given) != 3:
            return None
        (total, index, source), (into, at, kind) = given, kinds
        dim = call.values["dim"] % max(total.dim(), 1)
        if kind is None or kind.how != ROWS or kind.dim != dim or kind.degree or at is None or at.points is None:
            return None
        along = dim if index.dim() == source.dim() > 1 else 0
        if at.dim != along or _entries(at) != _entries(kind) or index.shape[along] != source.shape[dim]:
            return None
        there = Kind(ROWS, dim, *_rows_of(at.points)[:2], order=at.points.order)
        if total.shape[dim] != at.points.length or into is None:
            return None
        same = (into.how, into.dim, _entries(into), into.degree) == (ROWS, dim, _entries(there), 0)
        return [replace(there, learns=kind.learns or into.learns)] if same or into.alike(dim) else None

    def _counted(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """How often each number is there: a sum over all entries, in whatever order."""
        bounds = [call.values.get(n) or 0 for n in ("min", "max")]
        if call.schema.functional == "histc" and bounds[0] >= bounds[1]:  # the data's own
            return None
        if any(k is None or k.how != ROWS or k.degree or _entries(k) != _entries(kinds[0]) for k in kinds):
            return None
        where = f"{call.schema.functional} at {record.user_line()}"
        return [Kind(ADDS, degree=1, where=where, counts=True, learns=any(k is not None and k.learns for k in kinds))]

    def _ends(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """Where groups end, of how many are in each: whole numbers, of whatever dtype they are and become."""
        kind, whole = kinds[0], not given[0].is_floating_point() and not given[0].is_complex()
        if kind is None or not (kind.counts or (whole and (kind.how, kind.degree) == (ADDS, 1))):
            return None
        return [replace(kind, counts=True)]

    def _cast(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """Counts that ``histc`` gives as floats are whole numbers: nothing of them is rounded off."""
        return [kinds[0]] if kinds[0] is not None and kinds[0].counts else None

    def _in_groups(self, call: Call, given: Sequence[Tensor], kinds: Known, seen: Sequence[Tensor]) -> Found:
        """Sorted rows by the matrix of their group, which ends where the counts of the groups say."""
        kind, weights, ends = kinds[0], given[1], kinds[-1]
        if kind is None or kind.how != ROWS or not kind.order or kind.dim or weights.dim() != 3:
            return None
        counts = ends is not None and ends.how in (ADDS, COUNT) and ends.degree == 1
        return [replace(kind, learns=True)] if counts and (kinds[1] is None or kinds[1].alike(0)) else None


_USES = {
    "sort": Orders._sorted, "argsort": Orders._sorted, "index": Orders._picked, "index_select": Orders._picked,
    "gather": Orders._gathered,
    "floor_divide": Orders._divided, "div": Orders._divided, "remainder": Orders._divided, "index_put": Orders._put,
    "scatter": Orders._put, "index_copy": Orders._put, "index_add": Orders._added, "scatter_add": Orders._added,
    "histc": Orders._counted, "bincount": Orders._counted, "cumsum": Orders._ends,
    "_to_copy": Orders._cast,
    "_grouped_mm": Orders._in_groups,
}  # fmt: skip


def orders_of(kinds: Known) -> set[int]:
    """The orders in which the rows of operands are."""
    return {k.order for k in kinds if k is not None and k.how in (ROWS, PLACES)}


def is_ordered(kind: Kind | None) -> bool:
    """Whether a value has rows in another order, or says in which they are."""
    return kind is not None and bool(kind.order or kind.how == ORDER)


def _entries(kind: Kind | None) -> tuple[int, int, int]:
    return (0, 0, 0) if kind is None else (kind.before, kind.size, kind.order)


def _rows_of(points: Entries | None) -> tuple[int, int, int]:
    return (0, 0, 0) if points is None else (points.before, points.size, points.order)


def _is_permutation(kind: Kind, x: Tensor) -> bool:
    """Whether numbers of entries name each entry once."""
    points = kind.points
    return kind.how == ORDER and points is not None and x.shape[kind.dim] == points.length == _reach(kind)


def _reach(kind: Kind) -> int:
    """How many entries a dim has that is in an order, or that an order's numbers name."""
    assert kind.points is not None
    return kind.size if kind.order else kind.points.size


def _back(kind: Kind, dim: int) -> Kind:
    """The numbers that put entries back, from those that name them."""
    points = kind.points
    assert points is not None
    return Kind(
        ORDER, dim, points.before, points.size, order=points.order,
        points=Entries(kind.order, kind.before, kind.size, points.length),
    )  # fmt: skip


def _lies_as(kind: Kind | None, at: Kind) -> bool:
    """Whether another index is the same for all rows, or lies as the first one."""
    if kind is None or kind.alike(0):
        return kind is not None
    return kind.how == ROWS and kind.dim == at.dim and _entries(kind) == _entries(at)


def _first_index(call: Call) -> int | None:
    """The dim that the first index is for; None if there is no tensor of numbers."""
    at = [d for d, x in enumerate(call.values["indices"]) if isinstance(x, Tensor)]
    numbers = at and at == [*range(at[0], at[0] + len(at))] and call.values["indices"][at[0]].dtype != torch.bool
    return at[0] if numbers else None


def _counts_up(x: Tensor) -> bool:
    return not x.is_floating_point() and torch.equal(x, torch.arange(len(x), device=x.device))
