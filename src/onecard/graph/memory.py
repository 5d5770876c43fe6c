"""Who shares memory with whom in a graph, and who writes: what a pass has to know before it moves or drops a node."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from onecard import recorded
from onecard._torch import OpOverload
from onecard.comm import again
from onecard.graph.writes import written_by
from onecard.rules.call import schema_of

# They may give their operand itself, or a view of it, although their schema does not say so.
PERHAPS = {"contiguous", "reshape", "to", "flatten", "resolve_conj", "resolve_neg", "expand_as", "view_as", "type_as", "float",
            "squeeze", "movedim", "narrow", "unflatten", "split", "chunk", "_reshape_alias", "reshape_as", "matrix_H", "mT",
            "_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
            "einsum", "swapaxes", "swapdims", "moveaxis", "tensor_split", "dropout",
            "feature_dropout", "alpha_dropout"}  # fmt: skip


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
            shared = [self.roots[n] for n in ([] if apart and _own_result(node) else _shares(node))]
            self.roots[node] = frozenset[fx.Node]().union(*shared) if shared else frozenset([node])
            written = [self.roots[n] for n in written_by(node)]
            if written:
                self.writes[node] = frozenset[fx.Node]().union(*written)
        self.written = frozenset[fx.Node]().union(*self.writes.values()) if self.writes else frozenset()

    def steady(self, node: fx.Node) -> bool:
        """Whether nobody ever writes to what a node gives."""
        return not self.roots[node] & self.written


def _shares(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory a node's result may be."""
    target: Any = node.target
    if node.op != "call_function" or node.meta.get("own"):  # of what may be a view or not: it was seen not to be one
        return []
    if target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if isinstance(target, OpOverload):
        schema = schema_of(target)
        if schema.name in PERHAPS:
            return [n for n in node.all_input_nodes if "tensor" in n.meta]
        if schema.views:
            return [n for n in node.all_input_nodes[:1] if "tensor" in n.meta]
        return written_by(node)
    return list(written_by(node))


def _own_result(node: fx.Node) -> bool:
    """Whether a node takes one of several tensors that an operator has made anew."""
    if node.target is not operator.getitem:
        return False
    maker: Any = node.args[0]
    return isinstance(maker.target, OpOverload) and not _shares(maker)


def effects(node: fx.Node) -> bool:
    """Whether a node does something besides giving a result and writing to tensors: it sends, draws, or raises."""
    target: Any = node.target
    if node.op != "call_function":
        return True
    if isinstance(target, OpOverload):
        return schema_of(target).effects
    return target in (again.message, again.wait) or (target in recorded.writes and target not in recorded.pure)
