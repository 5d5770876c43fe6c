"""Operators that torch has no kernel for on this device, as the operators that are run for them: no Python between those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode
from onecard._torch.names import tree_map
from onecard.rules.table.matmul import linear_backward
from onecard.static.passes.adding import added, rehearsed
from onecard.static.passes.draft import editing, without

_MADE_OF: dict[Any, Callable[..., Any]] = {torch.ops.aten.linear_backward.default: linear_backward}


@editing
def taken_apart(graph: fx.Graph) -> bool:
    """Each such node replaced by the operators that its function calls, with the same operands."""
    found = [node for target in _MADE_OF for node in graph.find_nodes(op="call_function", target=target)]
    for node in sorted(found):
        with graph.inserting_before(node):
            parts = _inlined(node, graph)
        taken = {user: parts[user.args[1]] for user in sorted(node.users)}
        for user, part in taken.items():
            if "spec" in user.meta:
                part.meta["spec"] = user.meta["spec"]
        without(taken, [node])
    return bool(found)


def _inlined(node: fx.Node, graph: fx.Graph) -> Any:
    """The nodes of what a function gives."""
    operands: dict[int, fx.Node] = {}
    alive: list[Tensor] = []

    def known(n: fx.Node) -> Any:
        x = rehearsed(n)
        operands[id(x)] = n
        alive.append(x)
        return x

    args = fx.map_arg(node.args, known)
    with _torch.below_autograd(), _Writes(graph, node, operands, alive):
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
