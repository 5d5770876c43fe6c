"""Gradient merge: what a count of the batch depends on, from node to node, and what of it runs when.

A count is a sum over rows of what each row says itself, whatever comes of it later. What each row says is known by the rules: a
row stays apart in an operator whose rule may cut the factor in which the rows lie.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.rules.call import Call, schema_of
from onecard.rules.registry import bound_of
from onecard.static.passes.dependence import ROWS, AddedNumber, Kind, degree_of, may_count
from onecard.static.passes.once import Once, cut
from onecard.static.passes.row_linear import makes_alike
from onecard.static.passes.row_places import factor_of, of_two_rows, outer_of
from onecard.static.price.price import call_of
from onecard.static.step.memory import effects
from onecard.static.step.nodes import traits

aten = torch.ops.aten
NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BY_ELEMENT = ("masked_fill",)  # which torch does not say of them
_WINDOWS = ("slice", "select", "as_strided", "unfold", "diagonal")  # some of what there is
_SHAPED = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")
_TABLES = ("gather", "index_select", "index", "embedding")

EACH, SUM, AVERAGE, AFTER = "each", "sum", "average", "after"
"""What a node of a count is for: each microbatch; each, then added up; each, then averaged; once, with what came of these."""


class Chain:
    """What a node depends on, and what of it is for what, if it is a count of the batch; ``known`` says so."""

    def __init__(
        self,
        node: fx.Node,
        once: Once,
        order: dict[fx.Node, int],
        until: int,
        learns: set[fx.Node],
        terms: Collection[AddedNumber] = (),
    ) -> None:
        self.once, self.order, self.learns, self.terms = once, order, learns, terms
        self.does: dict[fx.Node, str] = {}
        self.degrees: dict[fx.Node, int] = {}
        self.rows: set[fx.Node] = set()  # in which each row may still have its own
        self.lie: dict[fx.Node, Kind] = {}  # where in those the rows lie, if it is known
        self.several: dict[fx.Node, list[Kind]] = {}  # the same of each result of a node (a sort)
        self.lengths: set[fx.Node] = set()  # in which a number may be the microbatch's length
        self.length = next((n.meta["tensor"][0][0] for n in once.own if cut(n)), 1)
        self.fixed: set[fx.Node] = set()  # in which there is nothing of the batch
        self.filled: set[fx.Node] = set()  # of those, what may have one for each row, where a microbatch has one row
        self.known = all(self._sort(n) for n in self._needed(node, until))

    def _needed(self, node: fx.Node, until: int) -> list[fx.Node]:
        """All that a node depends on as it is at a place, through memory too, in order, but for inputs."""
        found, wanted = set[fx.Node](), [node]
        while wanted:
            if (one := wanted.pop()) not in found:
                found.add(one)
                wanted += _operands(one)
                wanted += [n for n in self.once.memory.writers_to(one) if self.order[n] < until]
        return sorted((n for n in found if n.op == "call_function"), key=self.order.__getitem__)

    def _sort(self, node: fx.Node) -> bool:
        """Note what a node is for; False of one that no count has."""
        if node.target is operator.getitem and node.args[0] in self.several:
            self.rows.add(node)
            self.lie[node] = self.several[node.args[0]][node.args[1]]  # type: ignore[index]
            return self._is(node, EACH, 0)
        given = [n for n in _operands(node) if "tensor" in n.meta]
        for one in filter(cut, given):
            self.rows.add(one)
            self.lie[one] = Kind(ROWS, size=one.meta["tensor"][0][0])
        self.fixed.update(n for n in given if n.op == "placeholder" and not cut(n))
        written = self.once.memory.writes.get(node, frozenset())
        if (
            node in self.once.head
            or any(root.op == "placeholder" for root in written)
            or not self.learns.isdisjoint(given)
        ):
            return False
        changed = [] if self.fixed.issuperset(given) else [n for n in self.fixed if written & self.once.memory.roots[n]]
        if not self.filled.issuperset(changed):
            return False  # what was the same for all is no longer
        if self._bends(node, given):
            return False
        grows = term_of(node, self.terms) is not None
        if not grows and any(one.line == node.meta.get("line") for one in self.terms) and _adds_value(node):
            return False  # it may be one of those that grow
        if late := [n for n in given if self.does.get(n) in (SUM, AVERAGE, AFTER)]:
            alone = not any(n in self.rows or (self.does.get(n) == EACH and n not in self.fixed) for n in given)
            return alone and self._is(node, AFTER if _runs(node) else "", self._degree(node, late))
        if grows:
            return False
        if counting(node):
            return self._is(node, SUM, 1)
        if node.target is again.message:
            return self._gathered(node) and self._is(node, EACH, 0)
        if not isinstance(node.target, OpOverload) or effects(node):
            return False
        what, degree = self._early(node, given)
        return self._now_rows(changed, node) and self._is(node, what, degree)

    def _now_rows(self, changed: list[fx.Node], node: fx.Node) -> bool:
        """What may have had rows, once rows are written to it: it has them where the result has."""
        kind = self.lie.get(node)
        if changed and (kind is None or any(result_facts(n)[:1] != result_facts(node)[:1] for n in changed)):
            return False
        for one in changed:
            self.rows.add(one)
            self.lie[one] = kind  # type: ignore[assignment]
        self.fixed.difference_update(changed)
        self.filled.difference_update(changed)
        return True

    def _gathered(self, node: fx.Node) -> bool:
        """Whether a message gathers the ranks' rows, one rank's after the other's; where they come to lie is noted."""
        into, sent, kind, rest, *_ = node.args
        rows = self.lie.get(sent)  # type: ignore[arg-type]
        made_for_it = self.once.memory.roots[into] == {into} and into not in self.once.head  # type: ignore[index]
        if kind != "all_gather_into_tensor" or rows is None or (rows.dim, rows.before) != (0, 1) or not made_for_it:
            return False
        self.rows.add(into)  # type: ignore[arg-type]
        self.fixed.discard(into)
        self.filled.discard(into)
        self.lie[into] = replace(rows, size=rows.size * rest[0])  # type: ignore
        return True

    def _is(self, node: fx.Node, what: str, degree: int) -> bool:
        self.does[node], self.degrees[node] = what, degree
        return bool(what)

    def _early(self, node: fx.Node, given: list[fx.Node]) -> tuple[str, int]:
        """Of a node whose operands are rows, sums of some of them, or the same for all."""
        known, name = traits(node), schema_of(node.target).functional
        whole = "tensor" in node.meta and not node.meta["tensor"][0]
        rows = [n for n in given if n in self.rows]
        if self.fixed.issuperset(given):
            self.fixed.add(node)
            if not self.filled.isdisjoint(given):
                self.filled.add(node)
                if not (known.pointwise or known.views or known.may_view or known.copies):
                    return "", 0  # as many as there are rows, or one of it
            return EACH, 0
        if name in ("sum", "count_nonzero", "mean") and whole:
            return (AVERAGE, 0) if name == "mean" else (SUM, 1)
        if "tensor" in node.meta and makes_alike(schema_of(node.target)):
            self._fill(node)
            return EACH, 0
        by_element = known.pointwise or name in _BY_ELEMENT
        linear = name == "sum" or known.views or known.may_view or known.copies
        picks = name in _TABLES and given[0] in self.fixed
        if rows and (self._apart(node) or picks):
            self.rows.add(node)
        elif rows and name != "sum":
            known_places = name != "cat" and all(n in self.lie for n in rows)
            some = name in _WINDOWS or (known_places and (known.views or by_element))
            if some or not (linear or by_element):
                return "", 0  # some of the rows, or what has a value of its own for each
            self.rows.add(node)
        elif not (linear or (by_element and not any(self.does.get(n) == EACH and n not in self.fixed for n in given))):
            return "", 0
        return EACH, 0

    def _fill(self, node: fx.Node) -> None:
        """What is the same for all rows, of as many rows as the batch has: those lie where a dim is as long.

        Where a microbatch has one row, nothing says whether a dim of one is of rows.
        """
        if self.length == 1:
            self.fixed.add(node)
            self.filled.add(node)
            return
        dims = [d for d, n in enumerate(node.meta["tensor"][0]) if n == self.length]
        self.rows.add(node)
        if len(dims) == 1:
            self.lie[node] = Kind(ROWS, dims[0], size=self.length)

    def _apart(self, node: fx.Node) -> bool:
        """Whether each row of a node comes of its own rows alone, by the rule of its operator."""
        call, operands = call_of(node)
        call, size = _by_rule(call), self.length
        if size == 1 and any(n in self.lie for n in operands):
            lies = [self.lie.get(n) for n in operands]
            if (longer := of_two_rows(call, lies, [n in self.filled for n in operands])) is None:
                return False
            call, size = longer, 2
        bound = bound_of(call)
        if bound is None or any(n in self.rows and n not in self.lie for n in operands):
            return False
        scale = size // self.length
        there = {
            i: replace(k, size=k.size * scale) for i, n in enumerate(operands) if (k := self.lie.get(n)) is not None
        }
        places = {factor_of(bound, i, kind) for i, kind in there.items()}
        place = places.pop() if places else None
        if place is None or places or place[0] not in bound.free:
            return False
        factor, within = place
        others = [i for i, n in enumerate(operands) if n not in self.lie and n not in self.filled]
        if any(factor in dim for i in others for dim in bound.operands[i]):
            return False  # has a value of its own for each row
        kind, found = next(self.lie[n] for n in operands if n in self.lie), list[Kind]()
        for result in bound.results:
            dim = next((d for d, factors in enumerate(result) if factor in factors), None)
            if dim is None:
                return False
            found.append(replace(kind, dim=dim, before=within * outer_of(bound, result[dim], factor)))
        if len(found) > 1:
            self.several[node] = found
        else:
            self.lie[node] = found[0]
        return True

    def _degree(self, node: fx.Node, late: list[fx.Node]) -> int:
        name = schema_of(node.target).functional if isinstance(node.target, OpOverload) else ""
        places = {n: i for i, n in enumerate(node.args)} if name in ("div", "reciprocal") else {}
        return degree_of(name, {places.get(n, i): self.degrees[n] for i, n in enumerate(late)})

    def _bends(self, node: fx.Node, given: list[fx.Node]) -> bool:
        """Whether a node adds to, or bends, what was scaled by a number that may be a microbatch's length, not the batch's."""
        name = schema_of(node.target).functional if isinstance(node.target, OpOverload) else ""
        number: Any = node.args[1] if name in ("mul", "div") else None
        if isinstance(number, int | float) and (abs(number) == self.length or may_count(abs(number), self.length)):
            self.lengths.add(node)
        if self.lengths.isdisjoint(given):
            return False
        self.lengths.add(node)
        if node.target is again.message:  # ranks' shares of a sum, added up where they are
            into, sent, kind, rest, *_ = node.args
            return not (kind == "all_reduce" and into is sent and rest[0] in ("sum", "avg"))  # type: ignore[index, operator]
        known = traits(node)
        return not (name in ("mul", "div", "sum", "neg") or known.views or known.may_view or known.copies)


def _by_rule(call: Call) -> Call:
    """What a rank does with its part of a tensor, by the operators that have rules."""
    if call.func is aten.narrow.default:
        start: int = call.values["start"]
        made = Call(aten.slice.Tensor, [call.self, call.values["dim"], start, start + call.values["length"]], {})
    elif call.func is aten.reshape.default:
        made = Call(aten.view.default, [call.self, list(call.results[0].shape)], {})
    else:
        return call
    made.results = call.results
    return made


def _adds(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).functional in ("add", "sub", "rsub")


def _adds_value(node: fx.Node) -> bool:
    """Whether a node adds to a tensor what is no number of Python."""
    return _adds(node) and not (len(node.args) > 1 and isinstance(node.args[1], int | float))


def term_of(node: fx.Node, terms: Collection[AddedNumber]) -> int | None:
    """The argument of a node that is a number of its microbatch, and as many times as large for the batch; None: it has none."""
    return 1 if terms and added_number(node) in terms else None


def added_number(node: fx.Node) -> AddedNumber | None:
    """The number of Python that a node adds."""
    if not _adds(node) or _adds_value(node):
        return None
    return AddedNumber(schema_of(node.target).functional, node.meta.get("line", ""), float(abs(node.args[1])))  # type: ignore


def _runs(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it runs: an operator, or a message between ranks."""
    if node.target in (again.message, operator.getitem):
        return True
    return isinstance(node.target, OpOverload) and not effects(node)


def counting(node: fx.Node) -> Any:
    """The loss of torch's of which a node is the count; None of any other node."""
    loss: Any = node.args[0] if node.target is operator.getitem else None
    return loss if loss is not None and loss.target in NLL and node.args[1] == 1 else None


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a node needs; the count of a loss: labels and weights."""
    loss = counting(node)
    return node.all_input_nodes if loss is None else [_as_many(n) for n in loss.args[1:3] if isinstance(n, fx.Node)]


def _as_many(labels: fx.Node) -> fx.Node:
    """Labels as they are before torch's loss gives them further dims, in which one row is not told from a dim of one."""
    while isinstance(labels.target, OpOverload) and schema_of(labels.target).functional in _SHAPED:
        labels = labels.args[0]  # type: ignore[assignment]
    return labels


def result_facts(node: fx.Node) -> tuple[Any, ...]:
    """The facts of what an operator gives, or writes."""
    found = node.meta.get("tensor") or (node.args[0].meta.get("tensor") if isinstance(node.args[0], fx.Node) else None)
    return found or ()
