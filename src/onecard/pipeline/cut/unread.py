"""Gathers of ZeRO 3 in a backward pass that reads nothing of them. Pure."""

from __future__ import annotations

from typing import Any

from torch import fx

from onecard.comm.issue import again
from onecard.static.passes.once import phase_of
from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import copied_to
from onecard.static.step.order import only_names


def without_unread(graph: fx.Graph) -> fx.Graph:
    """The graph without gathers of what a forward writes to (an embedding's ``max_norm``), where nobody reads them.

    A block's backward gathers its parameters whatever it reads. Of one that a forward writes to it would have to do so before
    the next microbatch's forward, and no schedule of a pipeline waits for that.
    """
    gone = _unread(graph)
    if not gone:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in gone:
            names[node] = copied_to(made, node, names.__getitem__)
    return made


def _unread(graph: fx.Graph) -> set[fx.Node]:
    gathers = [n for n in graph.nodes if n.target is again.message and phase_of(n) == "backward" and not n.users]
    gathers = [n for n in gathers if "all_gather" in str(n.args[2])]
    if not gathers:
        return set()
    memory = GraphMemory(graph, apart=True)
    writes = {root for n, roots in memory.writes.items() if phase_of(n) == "forward" for root in roots}
    written = {root for root in writes if root.op == "placeholder"}
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in gathers:
        into, given = (memory.roots[x] for x in node.all_input_nodes)
        if given & written and all(root.op == "call_function" for root in into):
            found[node] = into
    for node in graph.nodes if found else ():
        if not only_names(node):
            read: Any = frozenset[fx.Node]().union(*(memory.roots[n] for n in node.all_input_nodes))
            found = {n: into for n, into in found.items() if n is node or not into & read}
    return {*found}
