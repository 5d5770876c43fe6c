"""Nodes whose result nobody uses, and that do nothing else: they go, and with them what only they used."""

from __future__ import annotations

from torch import fx

from onecard.static.passes.copying import copied
from onecard.static.step.memory import Memory, effects


def dead_nodes(graph: fx.Graph) -> fx.Graph:
    """A write stays if its memory is an input's or is read by a node that stays."""
    memory = Memory(graph)
    wanted: set[fx.Node] = set()
    read: set[fx.Node] = set()  # the memory that nodes that stay, later on, read
    changed = True
    while changed:  # a write is wanted by a reader after it, whose operand may be another name of the memory
        changed = False
        for node in reversed(graph.nodes):
            if node not in wanted and _stays(node, memory, wanted, read):
                wanted.add(node)
                changed = True
                read.update(*(memory.roots[n] for n in node.all_input_nodes))
    return copied(graph, lambda n: None, wanted.__contains__)


def _stays(node: fx.Node, memory: Memory, wanted: set[fx.Node], read: set[fx.Node]) -> bool:
    if effects(node) or any(user in wanted for user in node.users):
        return True
    written = memory.writes.get(node, frozenset())
    return any(root.op == "placeholder" or root in read for root in written)
