"""Gradient merge: what a microbatch scales its loss by, where that is a count of the batch alone, is the batch's own count.

A mean over what a batch counts (labels that are not ignored, tokens that are no padding, weights) is a sum, divided by a count.
Each microbatch has another count, and the mean of their means is not the mean over the batch. A count that follows from the
batch alone is known ahead for all microbatches: it is taken once, and each divides by it, over their number. What the step gives
back of such counts is the batch's, too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onecard.static.passes.adding import added
from onecard.static.passes.count_chain import (
    AFTER,
    AVERAGE,
    EACH,
    NLL,
    SUM,
    Chain,
    added_number,
    counting,
    result_facts,
    term_of,
)
from onecard.static.passes.dependence import ADDS, COUNT, AddedNumber, Kind
from onecard.static.passes.kept_once import JOINED
from onecard.static.passes.once import Once, phase_of
from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import copied_to

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div_.Tensor)
MEAN = 1  # torch's number for reduction="mean"
_SUM = 2
_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_TOTAL = 6  # the argument of nll_loss_backward that says by what the loss was divided


@dataclass
class _Count:
    """A count: its node, what each of the nodes that make it is for, in order, and how often the number of rows is a factor.

    ``by_length``: whether a number in it may be the microbatch's length.
    """

    node: fx.Node
    does: dict[fx.Node, str]
    degree: int
    by_length: bool


def with_whole_counts(
    graph: fx.Graph,
    k: int,
    training: bool = True,
    learns: Collection[Any] = (),
    rows: bool = True,
    results: Mapping[int, Kind] = {},
    terms: Collection[AddedNumber] = (),
) -> fx.Graph:
    """The graph of one microbatch whose losses are scaled by what the batch counts, over ``k``; the same one if none is.

    ``learns``: the places of inputs that get gradients, which are in no count. ``rows``: what has rows may be scaled, too, as it
    is known that what comes of them is linear in it, or told. The nodes of such a count have "count" in their
    meta: what they are for (``EACH``, ``SUM``, ``AVERAGE``, ``AFTER``). ``results``: how outputs depend on rows. ``terms``: what
    is added to counts of it, and grows with the batch.
    """
    if not {*terms} <= {term for n in graph.nodes if (term := added_number(n)) is not None}:
        return graph  # a number that would be left as it is
    rewrite = _Rewrite(graph, Once(graph, training=training), k, learns, rows, results, terms)
    return rewrite.made() if rewrite.counts or rewrite.given else graph


def scales(node: fx.Node) -> tuple[int, ...]:
    """The arguments by which a node may scale a loss."""
    if node.target is aten.where.self:
        return (0,)
    return (1, 0) if node.target is aten.mul.Tensor else (1,) if node.target in (*DIVISIONS, aten.mul_.Tensor) else ()


def is_whole(node: Any) -> bool:
    """Whether a node is a count of the whole batch, as this pass makes it."""
    return isinstance(node, fx.Node) and "count" in node.meta


# -- the graph with them -------------------------------------------------------------------------------------------------------


class _Rewrite:
    """The graph as it is made anew."""

    def __init__(
        self,
        graph: fx.Graph,
        once: Once,
        k: int,
        learns: Collection[Any],
        rows: bool,
        results: Mapping[int, Kind],
        terms: Collection[AddedNumber],
    ) -> None:
        self.graph, self.once, self.k, self.rows, self.terms = graph, once, k, rows, terms
        self.learns = {n for n in graph.find_nodes(op="placeholder") if _learns(n, learns)}
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.out = next(iter(reversed(graph.nodes)))
        self.counts: dict[fx.Node, _Count] = {}
        self.at: dict[fx.Node, _Count] = {}  # by the node that scales
        for node in graph.nodes:
            if phase_of(node) == "forward" and node not in once.tail and node in once.own:
                self._look(node)
        out: Any = self.out.args[0]
        self.kinds = {out[i]: kind for i, kind in results.items() if isinstance(out[i], fx.Node)}
        self.given = {n: c for n in self.out.all_input_nodes if (c := self._returned(n)) is not None}

    def _look(self, node: fx.Node) -> None:
        by: list[Any] = []
        if node.target in NLL and node.args[3] == MEAN:
            by = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]
        elif scales(node) and (self.rows or result_facts(node)[:1] == ((),)):
            numbers: list[Any] = [n for n in (node.args[i] for i in scales(node)) if is_number(n)]
            by = [n for n in numbers if self.once.has_own(n, node)]
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
        chain = Chain(node, self.once, self.order, until, self.learns, self.terms)
        late = chain.known and chain.does[node] in (SUM, AVERAGE, AFTER)
        return _Count(node, chain.does, chain.degrees[node], node in chain.lengths) if late else None

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
        """What the step gives back, if it is made of counts in a way that is no sum and no mean.

        Where a number in it is a microbatch's length, how often it is a factor is known, or else it is left as it is.
        """
        if node not in self.once.own or phase_of(node) != "forward" or node in self.once.tail or not is_number(node):
            return None
        known, kind = self._known(node, self.out), self.kinds.get(node)
        follows = known is not None and known.by_length if kind is None else kind.how not in (COUNT, ADDS)
        return known if known is not None and known.does[node] == AFTER and not follows else None

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
                    made = self._with(node, place, self.whole[by])  # type: ignore[index]
                    return self._joined(made, node, place)
        if node.target in _NLL_BACKWARD and node.args[_TOTAL] in self.whole:
            return self._with(node, _TOTAL, self.whole[node.args[_TOTAL]])  # type: ignore[index]
        if node in self.at:
            return self._with(node, 3, _SUM)
        made = copied_to(self.new, node, self.names.__getitem__)
        loss: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
        if loss in self.at:
            mean = self._like(node, aten.div.Tensor, made, self.whole[self.at[loss].node])
            mean.meta.update({JOINED: made.meta.pop(JOINED)} if JOINED in made.meta else {})
            return mean
        return made

    def _with(self, node: fx.Node, place: int, value: Any) -> fx.Node:
        made = copied_to(self.new, node, self.names.__getitem__)
        made.update_arg(place, value)
        return made

    def _joined(self, made: fx.Node, node: fx.Node, place: int) -> fx.Node:
        """How microbatches give together what is scaled by a count of the batch: as they give what it scales."""
        of: Any = node.args[1 - place] if len(node.args) > 1 and place < 2 else None
        degree = of.meta.get(JOINED) if isinstance(of, fx.Node) else None
        if degree is None and node.target is not aten.where.self:
            return made  # as it was seen itself: a loss that a rank divides on its own
        made.meta.pop(JOINED, None)
        if degree is not None and (count := self.at.get(node)) is not None and node.target is not aten.where.self:
            degree += -count.degree if node.target in DIVISIONS else count.degree
            made.meta.update({JOINED: degree} if degree in (0, 1) else {})
        return made

    def _shown(self, node: fx.Node) -> fx.Node:
        made = {n: self._longer(self._make(count, n), n) for n, count in self.given.items()}
        return copied_to(self.new, node, lambda n: made.get(n, self.names[n]))

    def _longer(self, made: fx.Node, node: fx.Node) -> fx.Node:
        """A result whose factors are lengths of a microbatch, with those of the batch."""
        length = self.kinds[node].length if node in self.kinds else 0
        by = self.k**length if length > 0 else float(self.k) ** length
        return self._put(AFTER, node, aten.mul.Tensor, made, by) if length else made

    def _scale(self, count: _Count, at: fx.Node) -> fx.Node:
        """A count, over the number of microbatches, ahead of the first node that scales by it."""
        made, facts = self._make(count, at), result_facts(at)
        dtype = made.meta["tensor"][2]
        if facts and not (dtype.is_floating_point or dtype is torch.bool):
            made = self._put(AFTER, at, aten._to_copy.default, made, dtype=facts[2])
        return self._put(AFTER, at, aten.div.Tensor, made, self.k**count.degree) if count.degree else made

    def _make(self, count: _Count, at: fx.Node) -> fx.Node:
        """The nodes of a count."""
        copies: dict[fx.Node, fx.Node] = {}
        for node, what in count.does.items():
            if (loss := counting(node)) is not None:
                copies[node] = self._of_loss(loss, node, copies)
            else:
                copies[node] = copied_to(self.new, node, lambda n: copies.get(n, self.names[n]))
                copies[node].meta.update(count=what, **_place(at))
                if (place := term_of(node, self.terms)) is not None:
                    copies[node].update_arg(place, node.args[place] * self.k)  # type: ignore[operator]
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


def is_number(node: Any) -> bool:
    """Whether a node gives a tensor without dims."""
    return isinstance(node, fx.Node) and "tensor" in node.meta and not node.meta["tensor"][0]
