"""Backward of a product in two nodes: what its input needs, and what its weights need, so that the latter can wait. Pure."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.step.nodes import called, copied_to

MASKS = {"aten::convolution_backward": 10, "aten::linear_backward": 3}
"""Operators that give a product's gradients for its input, its weight and its bias, and which argument says which are wanted."""


def halved(graph: fx.Graph) -> fx.Graph:
    """The graph with each such operator that gives both replaced by two; the same graph, if there is none.

    A batch norm's backward is not given running statistics that it does not read: later microbatches have changed them.

    Example:
        >>> import onecard, torch
        >>> net = torch.nn.Conv2d(1, 1, 1)
        >>> step = lambda x: net(x).sum().backward()
        >>> graph = onecard.record(step)(torch.ones(1, 1, 2, 2, requires_grad=True)).graph
        >>> sum("convolution_backward" in str(n.target) for n in halved(graph).nodes)
        2
    """
    both = {node for node in graph.nodes if _gives_both(node)}
    unread = {node: found for node in graph.nodes if (found := _unread(node))}
    if not both and not unread:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    weights = dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in both:
            names[node], weights[node] = _two(made, node, names)
        elif node.target is operator.getitem and node.args[0] in both and node.args[1]:
            maker: Any = node.args[0]
            names[node] = called(made, operator.getitem, (weights[maker], node.args[1]))
            names[node].meta.update(node.meta)
        else:
            names[node] = copied_to(made, node, names.__getitem__)
            if node in unread:
                names[node].args = tuple(None if i in unread[node] else x for i, x in enumerate(names[node].args))
    return made


def _unread(node: fx.Node) -> tuple[int, ...]:
    """The running statistics among the operands of a batch norm's backward, which in training are not read."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not target._schema.name.endswith("batch_norm_backward"):
        return ()
    names = [a.name for a in target._schema.arguments]
    trains = next((i for i, name in enumerate(names) if name in ("train", "training", "update")), None)
    if trains is not None and (trains >= len(node.args) or node.args[trains] is not True):
        return ()
    return tuple(i for i, name in enumerate(names) if name in ("running_mean", "running_var"))


def _mask(node: fx.Node) -> tuple[bool, ...]:
    if not isinstance(node.target, OpOverload):
        return ()
    at = MASKS.get(node.target._schema.name)
    if at is None or at >= len(node.args):
        return ()
    given: Any = node.args[at]
    return tuple(map(bool, given)) if isinstance(given, list | tuple) else ()


def _gives_both(node: fx.Node) -> bool:
    mask = _mask(node)
    plain = all(user.target is operator.getitem for user in node.users)
    return bool(mask) and mask[0] and any(mask[1:]) and plain


def _two(made: fx.Graph, node: fx.Node, names: dict[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node]:
    target: Any = node.target
    at, mask = MASKS[target._schema.name], _mask(node)
    found = []
    for wanted in ((True, *[False] * (len(mask) - 1)), (False, *mask[1:])):
        args = [*node.args]
        args[at] = [*wanted]
        half = called(made, target, *fx.map_arg((tuple(args), node.kwargs), names.__getitem__))
        half.meta.update(node.meta)
        found.append(half)
    return found[0], found[1]


__all__ = ["MASKS", "halved"]
