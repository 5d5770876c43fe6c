"""Graphs of FX, of which a step makes a dozen of thousands of nodes each: quickly made, and gone when they are of no more use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx

Kind = TypeVar("Kind", bound=fx.Graph)

_INSIDE = ("_graph_namespace", "_insert", "_find_nodes_lookup_table", "_len")
_known: bool = all(hasattr(fx.Graph(), name) for name in _INSIDE)
_mapped: Any = getattr(torch._C, "_fx_map_arg", fx.map_arg)


def node_put(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, kind: Any = None) -> fx.Node:
    """``graph.create_node`` of arguments without symbolic numbers, under a name that a node of another graph has.

    Example:
        >>> graph = fx.Graph()
        >>> [node_put(graph, "call_function", abs, (-1,), {}, "abs_1").name for _ in range(2)]
        ['abs_1', 'abs_2']
    """
    if not _known:
        return graph.create_node(op, target, args, kwargs, name, kind)
    names: Any = graph._graph_namespace
    base, _, number = name.rpartition("_")
    stem, count = (base, int(number)) if base and number.isdigit() else (name, 0)
    if name in names._used_names:
        count = names._base_count.get(stem, 0)
        while name in names._used_names:
            count += 1
            name = f"{stem}_{count}"
    names._base_count[stem] = count
    return _inserted(graph, names, name, op, target, args, kwargs, kind)


def node_made(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """``graph.call_function`` of arguments without symbolic numbers, under the name that FX would give.

    Example:
        >>> graph = fx.Graph()
        >>> [node_made(graph, abs, (-1,), {}).name for _ in range(2)], graph.call_function(abs, (-1,)).name
        (['abs_1', 'abs_2'], 'abs_3')
    """
    base = _base_of(target) if _known else None
    if base is None:
        return graph.create_node("call_function", target, args, kwargs)
    names: Any = graph._graph_namespace
    used, (name, free) = names._used_names, base
    number, stem = names._base_count.get(name, 0), name
    if not free:
        number += 1
        name = f"{stem}_{number}"
    while name in used:
        number += 1
        name = f"{stem}_{number}"
    names._base_count[stem] = number
    return _inserted(graph, names, name, "call_function", target, args, kwargs)


_bases: dict[int, tuple[Any, Any]] = {}


def _base_of(target: Any) -> tuple[str, bool] | None:
    """The name that FX makes of a function, and whether a node may have just that; None of one that ends in a number."""
    try:
        return _bases[id(target)][1]
    except KeyError:
        node = fx.Graph().create_node("call_function", target)
    stem, _, number = node.name.rpartition("_")
    ends = bool(stem) and number.isdigit()
    found = (stem, False) if ends and number == "1" else None if ends else (node.name, True)
    if hasattr(target, "_schema") or "<" not in getattr(target, "__qualname__", "<"):  # there are only so many of these
        _bases[id(target)] = target, found  # kept, so that its identity stays its own
    return found


def _inserted(
    graph: fx.Graph, names: Any, name: str, op: str, target: Any, args: Any, kwargs: Any, kind: Any = None
) -> fx.Node:
    names._used_names.add(name)
    node = fx.Node(graph, name, op, target, args, kwargs, kind)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.table[op, target if op == "call_function" else None][node] = None
    graph._len += 1
    return node


def node_copied(graph: fx.Graph, node: fx.Node, at: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """``graph.node_copy``; ``at`` gives a node's operands in that graph."""
    if not _known:
        return graph.node_copy(node, at)
    kwargs = _mapped(node._kwargs, at) if node._kwargs else node._kwargs
    made = node_put(graph, node.op, node.target, _mapped(node._args, at), kwargs, node.name, node.type)
    made.meta.update(node.meta)
    return made


def emptied(graph: fx.Graph) -> None:
    """Take a graph apart that nobody looks at any more. Its nodes refer to each other in circles, so that all of them would stay
    until Python looks for such, which in a large program is seldom."""
    if not _known or not hasattr(fx.Node, "_remove_from_list"):
        return
    for node in [*graph.nodes]:
        node._update_args_kwargs((), {})
        node._remove_from_list()
    vars(graph).clear()


def copy_of(graph: fx.Graph, kind: type[Kind]) -> Kind:
    """The same nodes, under the same names, as a graph of a kind. What they have in common with others (names, the table of
    targets) is copied as a whole: node by node it takes three times as long.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> _ = graph.output((graph.call_function(abs, (x,)),))
        >>> [node.name for node in copy_of(graph, fx.Graph).nodes]
        ['x', 'abs_1', 'output']
    """
    made, copies = kind(), dict[fx.Node, fx.Node]()
    if not _known or not hasattr(made, "_root"):
        made.graph_copy(graph, copies)
        return made
    at, root = copies.__getitem__, made._root
    for node in graph.nodes:
        kwargs = _mapped(node._kwargs, at) if node._kwargs else node._kwargs
        copy = fx.Node(made, node.name, node.op, node.target, _mapped(node._args, at), kwargs, node.type)
        copy.meta.update(node.meta)  # by assignment FX looks it up in its table of targets
        root._prepend(copy)
        copies[node] = copy
    names: Any = made._graph_namespace
    names._obj_to_name = {copy: node.name for node, copy in copies.items()}
    names._used_names = {*names._obj_to_name.values()}
    names._base_count = {**graph._graph_namespace._base_count}
    table: Any = graph._find_nodes_lookup_table.table
    for key, nodes in table.items():
        made._find_nodes_lookup_table.table[key] = {copies[node]: None for node in nodes}
    made._len = len(copies)
    return made


def in_order(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Put all nodes of a graph in this order."""
    if not hasattr(graph, "_root"):
        last, *others = reversed([*nodes])
        for node in others:
            last.prepend(node)
            last = node
        return
    for node in nodes:
        graph._root._prepend(node)
