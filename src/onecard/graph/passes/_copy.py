"""A graph copied node by node: what every pass begins with."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import fx


def node_copied(made: fx.Graph, node: fx.Node, known: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """``made.node_copy(node, known)``, at half its price.

    From torch 2.13 on, ``create_node`` walks all arguments in Python, to warn of numbers that a recording never holds; not
    those that a node is given afterwards.
    """
    args, kwargs = fx.map_arg(node.args, known), fx.map_arg(dict(node.kwargs), known)  # may put nodes ahead of this one
    new = made.create_node(node.op, node.target, None, None, node.name, node.type)
    new.args = args
    if kwargs:
        new.kwargs = kwargs
    new.meta = copy.copy(node.meta)
    return new


def copied(graph: fx.Graph, instead: Callable[[fx.Node], fx.Node | None], keep: Callable[[fx.Node], bool]) -> fx.Graph:
    """A new graph.

    Args:
        graph: is left as it is.
        instead: for a node, another one before it that gives the same, or None.
        keep: whether a node stays; only asked of those without another one.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> y = graph.call_function(abs, (graph.call_function(abs, (x,)),))
        >>> _ = graph.output((y,))
        >>> len(copied(graph, lambda n: x if n.name == "abs_1" else None, lambda n: True).nodes)
        3
    """
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        other = instead(node)
        if other is not None:
            names[node] = names[other]
        elif node.op != "call_function" or keep(node):
            names[node] = node_copied(made, node, names.__getitem__)
            names[node].name = node.name if node.op == "placeholder" else names[node].name
    return made
