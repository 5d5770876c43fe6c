"""A graph copied node by node: what every pass begins with."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from onecard.static.step.nodes import copied_to


def copied(graph: fx.Graph, instead: Callable[[fx.Node], fx.Node | None], keep: Callable[[fx.Node], bool]) -> fx.Graph:
    """A new graph; the same one, if nothing goes.

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
        >>> copied(graph, lambda n: None, lambda n: True) is graph
        True
    """
    others = {n: other for n in graph.nodes if (other := instead(n)) is not None}
    gone = {n for n in graph.nodes if n.op == "call_function" and n not in others and not keep(n)}
    if not others and not gone:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in others:
            names[node] = names[others[node]]
        elif node not in gone:
            names[node] = copied_to(made, node, names.__getitem__)
    return made
