"""Who shares memory with whom in a graph, and who writes: what a pass has to know before it moves or drops a node."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from onecard import recorded
from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.static.step.nodes import traits
from onecard.static.step.writes import written_by


class Memory:
    """The memory of each node of a graph, as the node that it came from first.

    Attributes:
        roots: for each node, the nodes whose memory it may share; itself, if it has its own.
        writes: for each node that writes, the roots of what it writes to.

    ``apart``: several results of one operator are told apart, each with its own memory.
    """

    def __init__(self, graph: fx.Graph, apart: bool = False) -> None:
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.writes: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in graph.nodes:
            written = written_by(node)
            shared = [self.roots[n] for n in ([] if apart and _own_result(node) else shares(node, written))]
            self.roots[node] = _union(shared) if shared else frozenset([node])
            if written:
                self.writes[node] = _union([self.roots[n] for n in written])
        self.written = frozenset[fx.Node]().union(*self.writes.values()) if self.writes else frozenset()

    def steady(self, node: fx.Node) -> bool:
        """Whether nobody ever writes to what a node gives."""
        return not self.roots[node] & self.written


def _union(sets: list[frozenset[fx.Node]]) -> frozenset[fx.Node]:
    return sets[0] if len(sets) == 1 else frozenset[fx.Node]().union(*sets)


def shares(node: fx.Node, written: list[fx.Node] | None = None) -> list[fx.Node]:
    """The operands whose memory a node's result may be. ``written``: those that it writes to, if the caller knows them."""
    target: Any = node.target
    if node.op != "call_function" or node.meta.get("own"):  # of what may be a view or not: it was seen not to be one
        return []
    if target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if isinstance(target, OpOverload):
        known = traits(node)
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
    return isinstance(maker.target, OpOverload) and not shares(maker)


def effects(node: fx.Node) -> bool:
    """Whether a node does something besides giving a result and writing to tensors: it sends, draws, or raises."""
    target: Any = node.target
    if node.op != "call_function":
        return True
    if isinstance(target, OpOverload):
        return traits(node).effects
    return target in (again.message, again.wait) or (target in recorded.writes and target not in recorded.pure)
