"""Graphs of FX, of which a step makes a dozen of thousands of nodes each: quickly made, and gone when they are of no more use."""

from __future__ import annotations

from typing import Any

from torch import fx

_INSIDE = ("_graph_namespace", "_insert", "_find_nodes_lookup_table", "_len")
_known: bool = all(hasattr(fx.Graph(), name) for name in _INSIDE)


def node_put(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, kind: Any = None) -> fx.Node:
    """``graph.create_node`` of arguments without symbolic numbers, under a name that a node of another graph has.

    Example:
        >>> graph = fx.Graph()
        >>> [node_put(graph, "call_function", abs, (-1,), {}, "abs_1").name for _ in range(2)]
        ['abs_1', 'abs_2']
    """
    names: Any = graph._graph_namespace if _known else None
    if names is None or name in names._used_names:
        return graph.create_node(op, target, args, kwargs, name, kind)
    base, _, number = name.rpartition("_")
    if base and number.isdigit():
        names._base_count[base] = int(number)
    else:
        names._base_count.setdefault(name, 0)
    names._used_names.add(name)
    node = fx.Node(graph, name, op, target, args, kwargs, kind)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def emptied(graph: fx.Graph) -> None:
    """Take a graph apart that nobody looks at any more. Its nodes refer to each other in circles, so that all of them would stay
    until Python looks for such, which in a large program is seldom."""
    if not _known or not hasattr(fx.Node, "_remove_from_list"):
        return
    for node in [*graph.nodes]:
        node._update_args_kwargs((), {})
        node._remove_from_list()
    vars(graph).clear()
