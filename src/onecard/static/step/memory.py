"""Who shares memory with whom in a graph, and who writes: what a pass has to know before it moves or drops a node."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from onecard import recorded
from onecard.comm.issue import again
from onecard.rules.traits import Traits
from onecard.static.step.nodes import operator_of
from onecard.static.step.writes import written_by


class GraphMemory:
    """The memory of each node of a graph, as the node that it came from first.

    Attributes:
        roots: for each node, the nodes whose memory it may share; itself, if it has its own.
        writes: for each node that writes, the roots of what it writes to.

    ``apart``: several results of one operator are told apart, each with its own memory.
    """

    def __init__(self, graph: fx.Graph, apart: bool = False) -> None:
        self.roots: dict[fx.Node, frozenset[fx.Node]] = _of_inputs(graph)
        self.writes: dict[fx.Node, frozenset[fx.Node]] = {}
        roots = self.roots
        for node in graph.nodes:
            if node in roots:
                continue
            known = operator_of(node)
            if node.op != "call_function" or (known is not None and known.alone):
                roots[node] = frozenset([node])  # most nodes: nothing more is asked of them
                continue
            written: list[fx.Node] = [] if known is not None and not known.written else written_by(node)
            shared = [] if apart and _own_result(node) else shares(node, written, known)
            roots[node] = frozenset([node]) if not shared else _union(shared, roots)
            if written:
                self.writes[node] = _union(written, roots)
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        for node, places in self.writes.items():
            for root in places:
                self._writers.setdefault(root, []).append(node)
        self.written = frozenset(self._writers)

    def steady(self, node: fx.Node) -> bool:
        """Whether nobody ever writes to what a node gives."""
        return not self.roots[node] & self.written

    def writers_to(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that write to memory that a node may have; one that writes to several of it, as often."""
        return [n for root in self.roots[node] for n in self._writers.get(root, ())]


def _of_inputs(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Those of the placeholders: each, and the others that lie in its memory."""
    given = list(graph.find_nodes(op="placeholder"))
    held = (node.meta["input"].shares if "input" in node.meta else () for node in given)
    return {node: frozenset([node, *(given[i] for i in shares)]) for node, shares in zip(given, held, strict=True)}


def _union(nodes: list[fx.Node], roots: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    first, *others = nodes
    return roots[first].union(*(roots[n] for n in others)) if others else roots[first]


def shares(node: fx.Node, written: list[fx.Node] | None = None, known: Traits | None = None) -> list[fx.Node]:
    """The operands whose memory a node's result may be. ``written``: those that it writes to, ``known``: its operator's traits,
    if the caller has them."""
    target: Any = node.target
    known = known or operator_of(node)
    if node.op != "call_function" or (known is not None and known.alone):
        return []
    if node.meta.get("own"):  # of what may be a view or not: it was seen not to be one
        return []
    if target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if known is not None:
        if known.may_view:
            return [n for n in node.all_input_nodes if "tensor" in n.meta]
        if known.views:
            return [n for n in node.all_input_nodes[:1] if "tensor" in n.meta]
        if not target._schema.is_mutable:
            return []  # statistics that it writes to are none of its results
    return written_by(node) if written is None else written


def _own_result(node: fx.Node) -> bool:
    """Whether a node takes one of several tensors that an operator has made anew."""
    if node.target is not operator.getitem:
        return False
    maker: Any = node.args[0]
    known = operator_of(maker)
    return known is not None and not shares(maker, known=known)


def effects(node: fx.Node) -> bool:
    """Whether a node does something besides giving a result and writing to tensors: it sends, draws, or raises."""
    target: Any = node.target
    if node.op != "call_function":
        return True
    known = operator_of(node)
    if known is not None:
        return known.effects
    return target in (again.message, again.wait) or (target in recorded.writes and target not in recorded.pure)
