"""Nodes whose result nobody uses, and that do nothing else: they go, and with them what only they used."""

from __future__ import annotations

from torch import fx

from onecard.static.passes.draft import editing, memory_of, without
from onecard.static.step.memory import GraphMemory, effects


@editing
def dead_nodes(graph: fx.Graph) -> bool:
    """A write stays if its memory is an input's or is read by a node that stays."""
    memory = memory_of(graph)
    wanted: set[fx.Node] = set()
    read = {
        n for n in graph.nodes if n.op == "placeholder"
    }  # memory that stays, and what nodes that stay, later on, read
    changed = True
    while changed:  # a write is wanted by a reader after it, whose operand may be another name of the memory
        changed = False
        for node in reversed(graph.nodes):
            if node not in wanted and _stays(node, memory, wanted, read):
                wanted.add(node)
                changed = True
                for n in node.all_input_nodes:
                    read |= memory.roots[n]
    return without({}, [n for n in graph.nodes if n.op == "call_function" and n not in wanted])


def _stays(node: fx.Node, memory: GraphMemory, wanted: set[fx.Node], read: set[fx.Node]) -> bool:
    if not wanted.isdisjoint(node.users) or effects(node):
        return True
    return node in memory.writes and not read.isdisjoint(memory.writes[node])
