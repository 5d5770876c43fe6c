"""Memory that was given up and filled again: what autograd has kept of it is read from the new memory.

In the program a parameter of ZeRO stage 3 has one memory, emptied after a block's forward and filled again before its backward.
In a recording each filling has a memory of its own; left as they are, names of the first one (the views that autograd keeps)
would hold it until they are read, and the second would be filled for nobody.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.step.memory import shares

Refill = tuple[fx.Node, fx.Node]
"""Memory that was given up, and the node that makes the memory in its place."""


def renew(graph: fx.Graph, refills: Sequence[Refill]) -> None:
    """Let the nodes after each refill use the new memory, by the same views of it; changes the graph."""
    if not refills:
        return
    before = {new: old for old, new in refills}
    now: dict[fx.Node, fx.Node] = {}  # for names of memory that was given up, the names that stand for them
    for node in [*graph.nodes]:
        if node in before:
            now[before[node]] = node
        for operand in node.all_input_nodes:
            name = _renewed(graph, now, operand, node)
            if name is not operand:
                node.replace_input_with(operand, name)


def _renewed(graph: fx.Graph, now: dict[fx.Node, fx.Node], name: fx.Node, user: fx.Node) -> fx.Node:
    """A name, or the one that stands for it where ``user`` runs."""
    if name in now:
        return _renewed(graph, now, now[name], user)
    if not _is_view(name):
        return name
    viewed = name.all_input_nodes[0]
    other = _renewed(graph, now, viewed, user)
    if other is viewed:
        return name
    with graph.inserting_before(user):
        made = graph.node_copy(name, lambda n: other if n is viewed else n)
    made.meta.update({k: user.meta[k] for k in ("phase", "module", "line") if k in user.meta})
    now[name] = made
    return made


def _is_view(node: fx.Node) -> bool:
    """Whether a node only names memory of its first operand."""
    if node.target is not operator.getitem and not (isinstance(node.target, OpOverload) and node.target.is_view):
        return False
    return len(node.all_input_nodes) == 1 and shares(node) == node.all_input_nodes
