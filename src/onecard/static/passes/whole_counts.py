"""Gradient merge: what a microbatch scales its loss by, where that is a count of the batch alone, is the batch's own count.

A mean over what a batch counts (labels that are not ignored, tokens that are no padding, weights) is a sum, divided by a count.
Each microbatch has another count, and the mean of their means is not the mean over the batch. A count that follows from the
batch alone is known ahead for all microbatches: it is taken once, and each divides by it, over their number. What the step gives
back of such counts is the batch's, too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.rules.call import schema_of
from onecard.static.passes.adding import added
from onecard.static.passes.dependence import degree_of, may_count
from onecard.static.passes.once import Once, cut, phase_of
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.nodes import copied_to, traits

aten = torch.ops.aten
NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
DIVISIONS = (aten.div.Tensor, aten.div_.Tensor)
MEAN = 1  # torch's number for reduction="mean"
_SUM = 2
_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_TOTAL = 6  # the argument of nll_loss_backward that says by what the loss was divided
_BY_ELEMENT = ("masked_fill",)  # which torch does not say of them
_TABLES = ("gather", "index_select", "index", "embedding")

EACH, SUM, AVERAGE, AFTER = "each", "sum", "average", "after"
"""What a node of a count is for: each microbatch; each, then added up; each, then averaged; once, with what came of these."""


@dataclass
class _Count:
    """A count: its node, what each of the nodes that make it is for, in order, and how often the number of rows is a factor."""

    node: fx.Node
    does: dict[fx.Node, str]
    degree: int


def with_whole_counts(
    graph: fx.Graph, k: int, training: bool = True, learns: Collection[Any] = (), rows: bool = True
) -> fx.Graph:
    """The graph of one microbatch whose losses are scaled by what the batch counts, over ``k``; the same one if none is.

    ``learns``: the places of inputs that get gradients, which are in no count. ``rows``: what has rows may be scaled, too, as it
    is known that what comes of them is linear in it, or told. The nodes of such a count have "count" in their
    meta: what they are for (``EACH``, ``SUM``, ``AVERAGE``, ``AFTER``).
    """
    rewrite = _Rewrite(graph, Once(graph, training=training), k, learns, rows)
    return rewrite.made() if rewrite.counts or rewrite.given else graph


def scales(node: fx.Node) -> tuple[int, ...]:
    """The arguments by which a node may scale a loss."""
    return (1, 0) if node.target is aten.mul.Tensor else (1,) if node.target in (*DIVISIONS, aten.mul_.Tensor) else ()


def is_whole(node: Any) -> bool:
    """Whether a node is a count of the whole batch, as this pass makes it."""
    return isinstance(node, fx.Node) and "count" in node.meta


# -- what a count depends on ---------------------------------------------------------------------------------------------------


class _Chain:
    """What a node depends on, and what of it is for what, if it is a count of the batch; ``known`` says so."""

    def __init__(self, node: fx.Node, once: Once, order: dict[fx.Node, int], until: int, learns: set[fx.Node]) -> None:
        self.once, self.order, self.learns = once, order, learns
        self.does: dict[fx.Node, str] = {}
        self.degrees: dict[fx.Node, int] = {}
        self.rows: set[fx.Node] = set()  # in which each row may still have its own
        self.lengths: set[fx.Node] = set()  # in which a number may be the microbatch's length
        self.length = next((n.meta["tensor"][0][0] for n in once.own if cut(n)), 1)
        self.fixed: set[fx.Node] = set()  # in which there is nothing of the batch
        self.known = all(self._sort(n) for n in self._needed(node, until))

    def _needed(self, node: fx.Node, until: int) -> list[fx.Node]:
        """All that a node depends on as it is at a place, through memory too, in order, but for inputs."""
        writes, roots = self.once.memory.writes, self.once.memory.roots
        found, wanted = set[fx.Node](), [node]
        while wanted:
            if (one := wanted.pop()) not in found:
                found.add(one)
                wanted += _operands(one)
                wanted += [n for n, written in writes.items() if self.order[n] < until and written & roots[one]]
        return sorted((n for n in found if n.op == "call_function"), key=self.order.__getitem__)

    def _sort(self, node: fx.Node) -> bool:
        """Note what a node is for; False of one that no count has."""
        given = [n for n in _operands(node) if "tensor" in n.meta]
        self.rows.update(n for n in given if cut(n))
        self.fixed.update(n for n in given if n.op == "placeholder" and not cut(n))
        written = self.once.memory.writes.get(node, frozenset())
        if (
            node in self.once.head
            or any(root.op == "placeholder" for root in written)
            or not self.learns.isdisjoint(given)
        ):
            return False
        if not self.fixed.issuperset(given) and any(written & self.once.memory.roots[n] for n in self.fixed):
            return False  # what was the same for all is no longer
        if self._bends(node, given):
            return False
        if late := [n for n in given if self.does.get(n) in (SUM, AVERAGE, AFTER)]:
            alone = not any(n in self.rows or (self.does.get(n) == EACH and n not in self.fixed) for n in given)
            return alone and self._is(node, AFTER if _runs(node) else "", self._degree(node, late))
        if _counting(node):
            return self._is(node, SUM, 1)
        if not isinstance(node.target, OpOverload) or effects(node):
            return False
        return self._is(node, *self._early(node, given))

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
            return EACH, 0
        if name in ("sum", "count_nonzero", "mean") and whole:
            return (AVERAGE, 0) if name == "mean" else (SUM, 1)
        by_element = known.pointwise or name in _BY_ELEMENT
        linear = name == "sum" or known.views or known.may_view or known.copies
        picks = name in _TABLES and given[0] in self.fixed
        if rows and name != "sum" and (linear or by_element or picks):
            self.rows.add(node)
        elif not (linear or (by_element and not any(self.does.get(n) == EACH and n not in self.fixed for n in given))):
            return "", 0
        return EACH, 0

    def _degree(self, node: fx.Node, late: list[fx.Node]) -> int:
        name = schema_of(node.target).functional if isinstance(node.target, OpOverload) else ""
        places = {n: i for i, n in enumerate(node.args)} if name in ("div", "reciprocal") else {}
        return degree_of(name, {places.get(n, i): self.degrees[n] for i, n in enumerate(late)})

    def _bends(self, node: fx.Node, given: list[fx.Node]) -> bool:
        """Whether a node adds to, or bends, what was scaled by a number that may be a microbatch's length, not the batch's."""
        name = schema_of(node.target).functional if isinstance(node.target, OpOverload) else ""
        scales = name in ("mul", "div") and isinstance(node.args[1], int | float)
        if scales and may_count(abs(float(node.args[1])), self.length):  # type: ignore[arg-type]
            self.lengths.add(node)
        if self.lengths.isdisjoint(given):
            return False
        self.lengths.add(node)
        known = traits(node)
        return not (name in ("mul", "div", "sum", "neg") or known.views or known.may_view or known.copies)


def _runs(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it runs: an operator, or a message between ranks."""
    if node.target in (again.message, operator.getitem):
        return True
    return isinstance(node.target, OpOverload) and not effects(node)


def _counting(node: fx.Node) -> Any:
    """The loss of torch's of which a node is the count; None of any other node."""
    loss: Any = node.args[0] if node.target is operator.getitem else None
    return loss if loss is not None and loss.target in NLL and node.args[1] == 1 else None


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a node needs; the count of a loss: labels and weights."""
    loss = _counting(node)
    return node.all_input_nodes if loss is None else [n for n in loss.args[1:3] if isinstance(n, fx.Node)]


# -- the graph with them -------------------------------------------------------------------------------------------------------


class _Rewrite:
    """The graph as it is made anew."""

    def __init__(self, graph: fx.Graph, once: Once, k: int, learns: Collection[Any], rows: bool) -> None:
        self.graph, self.once, self.k, self.rows = graph, once, k, rows
        self.learns = {n for n in graph.find_nodes(op="placeholder") if _learns(n, learns)}
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.out = next(iter(reversed(graph.nodes)))
        self.counts: dict[fx.Node, _Count] = {}
        self.at: dict[fx.Node, _Count] = {}  # by the node that scales
        for node in graph.nodes:
            if phase_of(node) == "forward" and node not in once.tail and node in once.own:
                self._look(node)
        self.given = {n: c for n in self.out.all_input_nodes if (c := self._returned(n)) is not None}

    def _look(self, node: fx.Node) -> None:
        by: list[Any] = []
        if node.target in NLL and node.args[3] == MEAN:
            by = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]
        elif scales(node) and (self.rows or _result(node)[:1] == ((),)):
            by = [n for n in (node.args[i] for i in scales(node)) if is_number(n) and n in self.once.own]
        if (count := next(filter(None, (self._count(n, node) for n in by)), None)) is not None:
            self.at[node] = count

    def _count(self, node: fx.Node, at: fx.Node) -> _Count | None:
        if node not in self.counts and (known := self._known(node, at)) is not None and self._only_scales(node):
            self.counts[node] = known
        return self.counts.get(node)

    def _known(self, node: fx.Node, at: fx.Node) -> _Count | None:
        roots, until = self.once.memory.roots[node], self.order[at]
        if any(self.order[n] > until and roots & places for n, places in self.once.memory.writes.items()):
            return None
        chain = _Chain(node, self.once, self.order, until, self.learns)
        late = chain.known and chain.does[node] in (SUM, AVERAGE, AFTER)
        return _Count(node, chain.does, chain.degrees[node]) if late else None

    def _only_scales(self, count: fx.Node) -> bool:
        """Whether backward takes a count as a factor alone, as it does if forward does so."""
        learns = [u for u in count.users if phase_of(u) == "backward"]
        if not learns:
            return True
        others = [u for u in count.users if phase_of(u) != "backward" and u.op != "output"]
        return all(_scales_by(u, count) for u in learns) and all(
            _scales_by(u, count) or not _floats(u) or self._known(u, self.out) is not None for u in others
        )

    def _returned(self, node: fx.Node) -> _Count | None:
        """What the step gives back, if it is made of counts in a way that is no sum and no mean."""
        if node not in self.once.own or phase_of(node) != "forward" or node in self.once.tail or not is_number(node):
            return None
        known = self._known(node, self.out)
        return known if known is not None and known.does[node] == AFTER else None

    def made(self) -> fx.Graph:
        self.new, self.names = fx.Graph(), dict[fx.Node, fx.Node]()
        self.whole: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            self.names[node] = self._copy(node)
        found = (*self.counts.values(), *self.given.values())
        self._drop([self.names[n] for count in found for n in count.does])
        return self.new

    def _copy(self, node: fx.Node) -> fx.Node:
        if (count := self.at.get(node)) is not None and count.node not in self.whole:
            self.whole[count.node] = self._scale(count, node)
        if node is self.out:
            return self._shown(node)
        if scales(node) and (node in self.at or phase_of(node) == "backward"):
            for place in scales(node):
                if (by := node.args[place]) in self.whole and (count is None or count.node is by):
                    return self._with(node, place, self.whole[by])  # type: ignore[index]
        if node.target in _NLL_BACKWARD and node.args[_TOTAL] in self.whole:
            return self._with(node, _TOTAL, self.whole[node.args[_TOTAL]])  # type: ignore[index]
        if node in self.at:
            return self._with(node, 3, _SUM)
        made = copied_to(self.new, node, self.names.__getitem__)
        loss: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
        if loss in self.at:
            return self._like(node, aten.div.Tensor, made, self.whole[self.at[loss].node])
        return made

    def _with(self, node: fx.Node, place: int, value: Any) -> fx.Node:
        made = copied_to(self.new, node, self.names.__getitem__)
        made.update_arg(place, value)
        return made

    def _shown(self, node: fx.Node) -> fx.Node:
        made = {n: self._make(count, n) for n, count in self.given.items()}
        return copied_to(self.new, node, lambda n: made.get(n, self.names[n]))

    def _scale(self, count: _Count, at: fx.Node) -> fx.Node:
        """A count, over the number of microbatches, ahead of the first node that scales by it."""
        made, facts = self._make(count, at), _result(at)
        if facts and not made.meta["tensor"][2].is_floating_point:
            made = self._put(AFTER, at, aten._to_copy.default, made, dtype=facts[2])
        return self._put(AFTER, at, aten.div.Tensor, made, self.k**count.degree) if count.degree else made

    def _make(self, count: _Count, at: fx.Node) -> fx.Node:
        """The nodes of a count."""
        copies: dict[fx.Node, fx.Node] = {}
        for node, what in count.does.items():
            if (loss := _counting(node)) is not None:
                copies[node] = self._of_loss(loss, node, copies)
            else:
                copies[node] = copied_to(self.new, node, lambda n: copies.get(n, self.names[n]))
                copies[node].meta.update(count=what, **_place(at))
        return copies[count.node]

    def _of_loss(self, loss: fx.Node, like: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """How many labels count, or their weights."""
        labels, weights = (n if n is None else copies.get(n, self.names[n]) for n in loss.args[1:3])  # type: ignore
        counted = self._put(EACH, like, aten.ne.Scalar, labels, loss.args[4])
        if weights is None:
            total = self._put(SUM, like, aten.sum.default, counted)
            return self._put(AFTER, like, aten._to_copy.default, total, dtype=like.meta["tensor"][2])
        there = self._put(EACH, like, aten.mul.Tensor, labels, counted)  # an ignored label may be none of the classes
        weight = self._put(EACH, like, aten.index.Tensor, weights, [there])
        return self._put(SUM, like, aten.sum.default, self._put(EACH, like, aten.mul.Tensor, weight, counted))

    def _put(self, what: str, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._like(like, target, *args, **kwargs)
        made.meta["count"] = what
        return made

    def _like(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the operator of another one."""
        made = added(self.new, like, target, *args, **kwargs)
        made.meta.update(_place(like))
        return made

    def _drop(self, nodes: list[fx.Node]) -> None:
        """Take away what a microbatch's own count was made of, if nobody else reads it. Messages, too: all ranks do so alike."""
        memory, gone = GraphMemory(self.new), set[fx.Node]()
        order = {n: i for i, n in enumerate(self.new.nodes)}
        for node in sorted({*nodes}, key=order.__getitem__, reverse=True):
            written = memory.writes.get(node, frozenset())
            readers = {
                n for n in self.new.nodes if written & memory.roots[n] for n in n.users if order[n] > order[node]
            }
            if all(user in gone for user in (*node.users, *readers)):
                gone.add(node)
                self.new.erase_node(node)


def _place(node: fx.Node) -> dict[str, Any]:
    """Of which of the program's operators a node is a part."""
    return {k: node.meta[k] for k in ("operator",) if k in node.meta}


def _scales_by(node: fx.Node, count: fx.Node) -> bool:
    """Whether a node takes a count as a factor alone."""
    if node.target in _NLL_BACKWARD:
        return node.args[_TOTAL] is count
    return any(node.args[i] is count for i in scales(node)) and [*node.args].count(count) == 1


def _floats(node: fx.Node) -> bool:
    """Whether a gradient may come through a node."""
    facts = node.meta.get("tensor")
    return facts is None or facts[2].is_floating_point or facts[2].is_complex


def _learns(node: fx.Node, places: Collection[Any]) -> bool:
    known = node.meta.get("input")
    return known is not None and (known.kind == "parameter" or known.where in places)


def _result(node: fx.Node) -> tuple[Any, ...]:
    """The facts of what an operator gives, or writes."""
    found = node.meta.get("tensor") or (node.args[0].meta.get("tensor") if isinstance(node.args[0], fx.Node) else None)
    return found or ()


def is_number(node: Any) -> bool:
    """Whether a node gives a tensor without dims."""
    return isinstance(node, fx.Node) and "tensor" in node.meta and not node.meta["tensor"][0]
