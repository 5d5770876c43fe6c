"""Operators that torch has no kernel for on this device, as the operators that are run for them: no Python between those."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode
from onecard._torch.names import tree_map
from onecard.rules.table.matmul import linear_backward
from onecard.static.passes.adding import added, rehearsed
from onecard.static.step.nodes import copied_to

_MADE_OF: dict[Any, Callable[..., Any]] = {torch.ops.aten.linear_backward.default: linear_backward}


def taken_apart(graph: fx.Graph) -> fx.Graph:
    """Each such node replaced by the operators that its function calls, with the same operands."""
    if not any(n.target in _MADE_OF for n in graph.nodes):
        return graph
    made, names = fx.Graph(), dict[fx.Node, Any]()
    parts: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target in _MADE_OF:
            parts[node] = _inlined(node, made, names)
        elif node.target is operator.getitem and node.args[0] in parts:
            part = parts[node.args[0]][node.args[1]]
            names[node] = part
            if "spec" in node.meta:
                part.meta["spec"] = node.meta["spec"]
        else:
            names[node] = copied_to(made, node, names.__getitem__)
    return made


def _inlined(node: fx.Node, made: fx.Graph, names: dict[fx.Node, Any]) -> Any:
    """The nodes of what a function gives."""
    operands: dict[int, fx.Node] = {}
    alive: list[Tensor] = []

    def known(n: fx.Node) -> Any:
        x = rehearsed(names[n])
        operands[id(x)] = names[n]
        alive.append(x)
        return x

    args = fx.map_arg(node.args, known)
    with _torch.below_autograd(), _Writes(made, node, operands, alive):
        results = _MADE_OF[node.target](*args)
    return [None if x is None else operands[id(x)] for x in results]


class _Writes(DispatchMode):
    """Puts what is called into a graph."""

    def __init__(self, graph: fx.Graph, like: fx.Node, known: dict[int, fx.Node], alive: list[Tensor]) -> None:
        super().__init__()
        self.graph, self.like, self.known, self.alive = graph, like, known, alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_map(self._node, (args, kwargs or {}))
        self.known[id(result)] = added(self.graph, self.like, func, *given[0], **given[1])
        self.alive.append(result)
        return result

    def _node(self, x: Any) -> Any:
        return self.known[id(x)] if isinstance(x, Tensor) else x
