"""A draft: the one copy of a graph that passes edit, one after the other. Only who has made it holds it.

A pass that is given any other graph edits a copy: for who calls it, it is a function graph -> graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec

from torch import fx

from onecard._torch.graphs import copy_of, emptied
from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import called
from onecard.static.step.order import Order

Options = ParamSpec("Options")


class Draft(fx.Graph):
    """A graph that is its passes' own, and what is known of it as long as nobody edits it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Any] = {}

    def sealed(self) -> fx.Graph:
        """It is edited no more: from now on it is a graph like any other."""
        self.known.clear()
        self.__class__ = fx.Graph  # type: ignore[assignment]
        return self


def memory_of(graph: fx.Graph, apart: bool = False) -> GraphMemory:
    """The memory of a graph; of a draft it is kept until the next edit."""
    if not isinstance(graph, Draft):
        return GraphMemory(graph, apart)
    if apart not in graph.known:
        graph.known[apart] = GraphMemory(graph, apart)
    found: GraphMemory = graph.known[apart]
    return found


def order_of(graph: fx.Graph) -> Order:
    """What of a graph has to run before what; of a draft it is kept until the next edit."""
    if not isinstance(graph, Draft):
        return Order(graph)
    if Order not in graph.known:
        graph.known[Order] = Order(graph, memory_of(graph, apart=True))
    found: Order = graph.known[Order]
    return found


def editing(
    edit: Callable[Concatenate[fx.Graph, Options], bool],
) -> Callable[Concatenate[fx.Graph, Options], fx.Graph]:
    """A pass of what edits a graph, and says whether it has.

    Example:
        >>> @editing
        ... def named(graph):
        ...     next(iter(graph.nodes)).meta["line"] = "here"
        ...     return True
        >>> graph = fx.Graph()
        >>> _ = graph.placeholder("x")
        >>> next(iter(named(graph).nodes)).meta, next(iter(graph.nodes)).meta
        ({'line': 'here'}, {})
    """

    @functools.wraps(edit)
    def run(graph: fx.Graph, *args: Options.args, **kwargs: Options.kwargs) -> fx.Graph:
        mine = isinstance(graph, Draft)
        made = graph if isinstance(graph, Draft) else copy_of(graph, Draft)
        if edit(made, *args, **kwargs):
            made.known.clear()
            return made if mine else made.sealed()
        if not mine:
            emptied(made)
        return graph

    return run


def without(instead: Mapping[fx.Node, fx.Node], gone: Iterable[fx.Node] = ()) -> bool:
    """Take nodes out of their graph.

    Args:
        instead: of nodes, in the order of the graph, another one before it that gives the same.
        gone: nodes that nobody uses who stays.

    Returns:
        Whether there were any.
    """
    names: dict[fx.Node, fx.Node] = {}
    for node, other in instead.items():
        names[node] = names.get(other, other)
        node.replace_all_uses_with(names[node])
    for node in sorted({*names, *gone}, reverse=True):
        node.graph.erase_node(node)
    return bool(names or gone)


def exchanged(node: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
    """Another call in place of a node, with its facts."""
    graph = node.graph
    with graph.inserting_before(node):
        made = called(graph, target, args, kwargs)
    made.meta.update(node.meta)
    without({node: made})
    return made
