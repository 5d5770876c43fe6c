"""How a value of a step depends on the rows of its batch, from operator to operator, by the rules' factors.

A value that has a row of its own for each row of the batch stays so through every operator whose rule may cut that factor. A sum
or a mean over it is additive. What takes rows together in another way (a maximum, a deviation, products of rows with each other)
is neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from onecard.comm.base import record
from onecard.rules.call import Call
from onecard.rules.registry import bound_of, find
from onecard.rules.rule import Bound
from onecard.static.passes import row_alike, row_places
from onecard.static.passes.dependence import (
    ADDS,
    ALIKE,
    COUNT,
    MIXED,
    ORDER,
    PLACES,
    ROWS,
    UNKNOWN,
    Kind,
    Verdict,
    degree_of,
    told,
)
from onecard.static.passes.row_linear import SUMS, fills, is_linear, lifts, makes_alike
from onecard.static.passes.row_numbers import SCALES, RowNumbers, value_of
from onecard.static.passes.row_orders import Orders, is_ordered, orders_of

_MEAN = 1  # torch's number for reduction="mean"
NOT_LINEAR = "is not linear in what all rows give together"


class Kinds(RowNumbers):
    """What operators make of values whose kinds are known, in a step that runs on ``rows`` rows."""

    def __init__(self, rows: int, before: Verdict | None, k: int) -> None:
        super().__init__(rows, before, k)
        self.orders = Orders(rows)

    def found(
        self,
        call: Call,
        given: list[Tensor],
        kinds: list[Kind | None],
        made: list[Tensor],
        ours: Sequence[bool],
        seen: Sequence[Tensor],
    ) -> list[Kind | None]:
        """Of what a call has made. ``seen``: what it was given, with data, as far as it has some."""
        count, known = len(made), [kind for kind in kinds if kind is not None and told(kind)]
        if call.schema.written and call.schema.functional in ("add", "sub") and _is_sum(kinds[-1]):
            first, summed = kinds[0], self.verdict.summed
            # Of the program, with what was added to it before; the space tells line 3 from line 31.
            if first is None or any(f" at {line} " in first.where for line in summed):
                summed.append(record.user_line())
        if not known or fills(call.schema):
            return [self._made_alike(call, given, kinds, ours[r], r) for r in range(count)]
        learns = any(k.learns for k in known) or any(_trains(x) for x in given)
        for how in (MIXED, UNKNOWN):
            if lost := [k for k in known if k.how == how]:
                return [lost[0]] * count
        if self.follows:
            return [self._mixed(call, "takes the length of a microbatch, which is not the batch's", learns)] * count
        if (made_so := self.orders.found(call, given, kinds, seen)) is not None:
            return [*made_so, *[None] * (count - len(made_so))]
        if any(map(is_ordered, known)):
            if kind := row_places.moved(call, kinds):
                return [kind] * count
            if any(k.how == ORDER for k in known) or len(orders_of(kinds)) > 1:
                return [self._mixed(call, "goes by where rows stand in the batch", learns)] * count
        if any(k.how == ROWS for k in known):
            return self._of_rows(call, given, kinds, count, learns)
        return [self._of_sums(call, given, kinds, learns)] * count

    def _made_alike(self, call: Call, given: list[Tensor], kinds: list[Kind | None], ours: bool, r: int) -> Kind | None:
        """A value in which there is nothing of the batch: whether it is the same for all rows."""
        name = call.schema.functional
        grows = None not in (self.first, self.number) and self.first != self.number
        if (self.follows or grows) and not ours:
            return self._mixed(call, "takes the length of a microbatch, which is not the batch's", learns=True)
        if makes_alike(call.schema) or lifts(call.schema, call.results[r]):
            lifted = bool(given) and "lift" in name and value_of(given[0]) == 0
            return Kind(ALIKE, zero="zero" in name or lifted or (name == "scalar_tensor" and not call.values["s"]))
        if name == "arange":  # of columns, where it is as long for a part of the rows, and there are as many by chance
            fixed = self._first(call, "length", call.results[r].shape[0]) == call.results[r].shape[0]
            if not fixed and tuple(call.results[r].shape) == (self.rows,) and not call.values.get("start"):
                return Kind(PLACES, size=self.rows)
        if kind := row_places.moved(call, kinds):
            return kind
        alike = bool(kinds) and all(k is not None and k.how == ALIKE and k.dims is None for k in kinds)
        if alike and not call.results[r].dim():
            return Kind(ALIKE)
        expanded = name in row_alike.EXPANDS or any(k is not None and k.how == ALIKE for k in kinds)
        if (not expanded and self.lengths.isdisjoint(call.results[r].shape)) or any(
            k is not None and k.how == PLACES for k in kinds
        ):
            return None
        bound = bound_of(call)
        return None if bound is None else row_alike.along(call, bound, kinds, r, self.lengths)

    def _mixed(self, call: Call, why: str, learns: bool) -> Kind:
        return Kind(MIXED, where=f"{call.schema.functional} at {record.user_line()} {why}", learns=learns)

    def _of_rows(
        self, call: Call, given: list[Tensor], kinds: list[Kind | None], count: int, learns: bool
    ) -> list[Kind | None]:
        name = call.schema.functional
        together = self._mixed(call, "takes rows of the batch together", learns)
        first = next(k for k in kinds if k is not None and k.how == ROWS)
        if "batch_norm" in name:
            if first.dim != 1 and not {name, call.values.get("training")} & {False, "_batch_norm_no_update"}:
                self.verdict.normalized.append(record.user_line())
            return [replace(first, learns=True), *[None] * (count - 1)]
        if call.values.get("scale_grad_by_freq"):
            return [self._mixed(call, "divides gradients by how often a microbatch has an entry", learns)] * count
        if name in _RECURRENT and kinds[0] is first:
            return [self._in_time(x, first) for x in call.results]
        if special := self._special(call, given, kinds, first, learns):
            return [special] * count
        if name in _OF_ELEMENTS or (name in _OF_LAST and first.dim < given[0].dim() - 1):
            return [replace(first, learns=learns)] * count
        bound = bound_of(_undropped(call))
        if bound is None:
            return [Kind(UNKNOWN, where=f"{name} at {record.user_line()}")] * count
        cut = {row_places.factor_of(bound, i, k) for i, k in enumerate(kinds) if k is not None and k.how == ROWS}
        place = cut.pop()
        if cut or place is None:
            return [together] * count
        factor, within = place
        for i, kind in enumerate(kinds):
            has = [d for d, factors in enumerate(bound.operands[i]) if factor in factors]
            lone = kind is None or kind.how == PLACES or (kind.how == ALIKE and not all(map(kind.alike, has)))
            if lone and kind is not None and kind.how == ALIKE and kind.size:
                if kind.size == first.size:  # of rows that are folded
                    lone = row_places.factor_of(bound, i, kind) != place
                elif has == [kind.dim] and given[i].shape[kind.dim] == first.size:  # of rows that lie side by side
                    lone = bool(kind.size % self.rows)
            if lone and has and i not in bound.unread:
                return [self._mixed(call, "has a value of its own for each row", learns)] * count
            if kind is not None and kind.how in (ADDS, COUNT) and not self._is_scale(name, i, given[i], kind):
                return [self._mixed(call, "puts what all rows give into each row", learns)] * count
        mean = name == "mean" or call.values.get("reduction") == _MEAN
        if factor not in bound.free and not (name.startswith("nll_loss") and mean):
            return [together] * count
        degree = self._degree_of_rows(call, bound, {i: k.degree for i, k in enumerate(kinds) if k is not None})
        if degree is None:
            return [self._mixed(call, "is not linear in rows that are scaled by their number", learns)] * count
        degree += self._degree(call, next(x for x, k in zip(given, kinds, strict=True) if k is first))
        there = Kind(ROWS, before=within, size=first.size, degree=degree, learns=learns, order=first.order)
        bare = frozenset(i for i, k in enumerate(kinds) if k is not None and k.zero)
        return [self._reduced(call, bound, r, factor, mean, there, bare) for r in range(count)]

    def _is_scale(self, name: str, i: int, x: Tensor, kind: Kind) -> bool:
        """Whether an operand is a count by which rows are multiplied or divided: see ``_of_sums``."""
        return (name == "mul" or (name == "div" and i == 1)) and not x.dim() and not kind.learns and not _trains(x)

    def _degree_of_rows(self, call: Call, bound: Bound, degrees: dict[int, int]) -> int | None:
        """Of what comes of rows, from theirs; None if it is no multiple of them."""
        if not any(degrees.values()) or call.schema.functional in _SIGNS:
            return 0
        if call.schema.functional in _SIZES:
            return degrees.get(0, 0)
        if call.schema.functional == "div":
            return degrees.get(0, 0) - degrees.get(1, 0)
        if not bound.terms and not bound.moves:
            return None
        terms = bound.terms or [(i,) for i in range(len(call.operands))]
        inside = {i for term in terms for i in term}
        found = {sum(degrees.get(i, 0) for i in term) for term in terms}
        lone = any(d for i, d in degrees.items() if i not in inside) or not self._adds_nothing(call)
        return None if len(found) > 1 or lone else found.pop()

    def _reduced(
        self, call: Call, bound: Bound, r: int, factor: int, mean: bool, there: Kind, bare: frozenset[int]
    ) -> Kind:
        """A result that has the rows' factor, or that is joined over it. ``there``: rows within the factor; ``bare``: zeros."""
        for dim, factors in enumerate(bound.results[r]):
            if factor in factors:
                if factor in bound.pieces:
                    return self._mixed(call, "goes by where rows stand in the batch", there.learns)
                return replace(there, dim=dim, before=row_places.outer_of(bound, factors, factor) * there.before)
        where = f"{call.schema.functional} at {record.user_line()}"
        lone = any(all(factor not in _all(bound.operands[i]) for i in t) for t in bound.terms if bare.isdisjoint(t))
        # A hook masks what other ranks have: their sum is no sum over rows.
        picks = factor in bound.pieces or call.schema.views
        if bound.reduce[r] != "sum" or lone or picks:
            return Kind(MIXED, where=f"{where} takes rows of the batch together", learns=there.learns)
        degree = there.degree + (0 if mean else 1)
        return Kind(ADDS, degree=degree, where=where, learns=there.learns, length=there.degree)

    def _in_time(self, x: Any, first: Kind) -> Kind | None:
        """What a recurrent layer gives: (time, rows, features), or as its states (layers, rows, features)."""
        dims = [d for d, n in enumerate(x.shape[:-1]) if n == first.size]
        dim = first.dim if first.dim in dims else next(iter(dims[::-1]), None)
        return None if dim is None else replace(first, dim=dim, learns=True)

    def _special(
        self, call: Call, given: list[Tensor], kinds: list[Kind | None], first: Kind, learns: bool
    ) -> Kind | None:
        """Operators that take a dim of rows apart, or put some together."""
        name = call.schema.functional
        at = next(i for i, k in enumerate(kinds) if k is first)
        whole = given[at].shape[first.dim] == first.size
        dim = call.values.get("dim", 0)
        if name == "cat" and whole and all(k is not None and k.how in (ROWS, ALIKE) for k in kinds):
            at = dim % given[0].dim()
            if at == first.dim and all(k.dim == at for k in kinds if k is not None and k.how == ROWS):
                return replace(first, size=call.results[0].shape[at], learns=learns)
        if (
            name in ("split", "split_with_sizes", "slice", "narrow", "chunk")
            and whole
            and first.size > self.rows
            and not first.order
        ):
            lengths = {x.shape[first.dim] for x in call.results}
            start = call.values.get("start") or 0
            if (
                dim % given[0].dim() == first.dim
                and len(lengths) == 1
                and not (start | (n := lengths.pop())) % self.rows
            ):
                return replace(first, size=n, learns=learns)
        if name == "transpose" and find(call.func) is None:  # in place
            a, b = (call.values[d] % given[0].dim() for d in ("dim0", "dim1"))
            return replace(first, dim={a: b, b: a}.get(first.dim, first.dim), learns=learns)
        if name in row_places.USES and (kind := row_places.USES[name](call, given, kinds, self.rows)):
            self.verdict.unsure |= (
                self.before is None
            )  # arange(4) are all rows here, and may be some of the whole batch's
            return replace(kind, learns=learns)
        return None

    def _of_sums(self, call: Call, given: list[Tensor], kinds: list[Kind | None], learns: bool) -> Kind:
        """Of values that all rows have given: what is linear in them stays additive."""
        told = [(i, k) for i, k in enumerate(kinds) if k is not None and k.how in (ADDS, COUNT)]
        first = next((k for _, k in told if k.how == ADDS), told[0][1])
        if not learns:
            return self._of_counts(call, told, first, kinds)
        name = call.schema.functional
        if name in ("div", "mul") and len(told) == 2 and not given[1].dim():
            # By a count, which is the whole batch's (``whole_counts``), or else compared with other microbatches' (``doubts``).
            known = [not (_trains(x) or k.learns) for x, k in zip(given, kinds, strict=True) if k is not None]
            if known != [False, True] and (name == "div" or known != [True, False]):
                return self._bent(call, learns)
            degrees = [k.degree for _, k in told]
            return replace(
                first, degree=degrees[0] + (degrees[1] if name == "mul" else -degrees[1]), learns=learns, counts=False
            )
        if name == "where" and (kept := self._where_counted(given, kinds)) is not None:
            return replace(kept, learns=learns, counts=False)
        if any(k.how == COUNT for _, k in told) or not is_linear(call, {i for i, _ in told}):
            return self._bent(call, learns)
        if len({k.degree for _, k in told}) > 1:
            return self._mixed(call, "puts a sum over rows and a mean over rows together", learns)
        if first.degree == 1 and not self._all_terms(call, kinds):
            return self._mixed(call, "adds what is no sum over rows to a sum over rows", learns)
        return replace(first, degree=first.degree + self._degree(call), learns=learns, counts=False)

    def _of_counts(self, call: Call, counts: list[tuple[int, Kind]], first: Kind, kinds: list[Kind | None]) -> Kind:
        """Of what the batch gives alone: a sum or a mean of rows, or made of such, with numbers that may be its length."""
        name, more = call.schema.functional, self._degree(call)
        degree = degree_of(name, {i: k.degree for i, k in counts}) + more
        length = degree_of(name, {i: k.length for i, k in counts}) + more
        rounds, whole = call.values.get("rounding_mode") is not None, self._all_terms(call, kinds)
        linear = is_linear(call, {i for i, _ in counts}) and not rounds
        kept = linear and len({k.length for _, k in counts}) == 1 and (whole or not first.length)
        if (more or any(k.length for _, k in counts)) and not kept and (rounds or name not in SCALES):
            return self._mixed(call, "is not linear in what is scaled by the length of a microbatch", learns=False)
        adds = (
            all(k.how == ADDS for _, k in counts)
            and linear
            and len({k.degree for _, k in counts}) == 1
            and (whole or not first.degree)
        )
        where = f"{name} at {record.user_line()}"
        return replace(first if adds else Kind(COUNT, where=where), degree=degree, length=length, counts=False)

    def _where_counted(self, given: list[Tensor], kinds: list[Kind | None]) -> Kind | None:
        """Of ``where(n > 0, sum / n, 0)``: what is kept, as the whole batch's count says; None of any other choice."""
        by, *others = kinds
        kept = [k for k in others if k is not None and k.how == ADDS]
        zeros = [k for k in others if k is not None and k.zero]
        counted = by is not None and by.how == COUNT and not (by.learns or given[0].dim() or _trains(given[0]))
        return kept[0] if counted and len(kept) == len(zeros) == 1 else None

    def _bent(self, call: Call, learns: bool) -> Kind:
        return self._mixed(call, NOT_LINEAR, learns)

    def _adds_nothing(self, call: Call) -> bool:
        """Whether no number is added to what a call is given."""
        return not (call.schema.functional in SUMS and len(call.operands) == 1 and call.values["other"])

    def _all_terms(self, call: Call, kinds: list[Kind | None]) -> bool:
        """Whether each term is of what all rows have given, or of zeros."""
        if call.schema.functional in SUMS and len(call.operands) == 1:
            return self.grows or self._adds_nothing(call)
        bound = bound_of(call)
        given = {i for i, k in enumerate(kinds) if k is not None and (k.how in (ADDS, COUNT) or k.zero)}
        terms = (bound.terms if bound is not None else ()) or [(i,) for i in range(len(kinds))]  # of ``stack``, each
        return all(given & {*term} for term in terms)


def _undropped(call: Call) -> Call:
    """A call without its dropout, for which attention has no rule: rows stay apart alike."""
    return call.with_values(dropout_p=0.0) if call.values.get("dropout_p") else call


def _is_sum(kind: Kind | None) -> bool:
    return kind is not None and kind.how in (ADDS, COUNT) and kind.degree == 1


_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_OF_ELEMENTS = (
    "native_dropout", "native_dropout_backward", "_fused_dropout", "_masked_scale", "rand_like", "randn_like", "randint_like",
    "bernoulli", "normal", "poisson", "binomial", "_standard_gamma", "_standard_gamma_grad", "rrelu_with_noise",
)  # fmt: skip
_OF_LAST = ("multinomial", "_sample_dirichlet", "_dirichlet_grad")
"""What draws has no row of the rules: a number for each element, and for what the last dim says."""
_SIGNS, _SIZES = ("sign", "sgn"), ("abs", "relu")  # of a positive multiple: the same; the same multiple


def tensors_of(call: Call, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call was given, in the order of its operands."""
    found = []
    for place, index in call.paths:
        value = args[place] if isinstance(place, int) else kwargs[place]
        found.append(value if index < 0 else value[index])
    return found


def _all(dims: Sequence[Sequence[int]]) -> Iterator[int]:
    for factors in dims:
        yield from factors


def _trains(x: Tensor) -> bool:
    return x.requires_grad
