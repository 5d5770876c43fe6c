"""Gradients of products added where the sum of earlier microbatches is kept, without a product of their own. Pure."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import called, copied_to
from onecard.static.step.order import only_names

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float64)
"""In which a product may be added to a sum; sums of shorter ones are rounded otherwise."""


def adding_products(graph: fx.Graph) -> fx.Graph:
    """``total = before + a @ b`` of a later microbatch -> ``before.addmm_(a, b)``, if nobody else reads the two.

    One block of memory less, and it is read and written once less.
    """
    dead = _unread(graph)
    found = _sums(graph, dead)
    if not found:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    products = {product: (total, before) for total, (before, product) in found.items()}
    for node in graph.nodes:
        if node in products:
            total, before = products[node]
            operands: Any = (before, *node.args)
            names[total] = called(made, aten.addmm_.default, tuple(names[n] for n in operands))
            names[total].meta.update(total.meta, part=node.meta.get("part"), own=False)
        elif node not in found and node not in dead:
            names[node] = copied_to(made, node, names.__getitem__)
    return made


def _sums(graph: fx.Graph, dead: set[fx.Node]) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """For each sum to be replaced what it adds to, and the product."""
    memory, order = GraphMemory(graph), {n: i for i, n in enumerate(graph.nodes)}
    found: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        before, product = _operands(node)
        if before is None or product is None or node.kwargs or order[before] > order[product]:
            continue
        alike = node.meta.get("tensor") == before.meta.get("tensor") and node.meta["tensor"][2] in _FLOATS
        fresh = before in found or (before.target is aten.mm.default and memory.steady(before))
        if alike and fresh and all({*n.users} - dead == {node} for n in (before, product)):
            found[node] = before, product
    return found


def _operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """What a sum over microbatches adds to, and the product of the later one."""
    args: Any = node.args
    if "microbatch" not in node.meta or len(args) != 2 or not all(isinstance(n, fx.Node) for n in args):
        return None, None
    before, product = args
    mine = product.target is aten.mm.default and product.meta.get("microbatch") == node.meta["microbatch"]
    return (before, product) if mine and before.meta.get("part") == node.meta.get("part") else (None, None)


def _unread(graph: fx.Graph) -> set[fx.Node]:
    """Views of one microbatch's gradients that nobody reads: of the sum they are taken anew."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and only_names(node) and found.issuperset(node.users):
            found.add(node)
    return found


__all__ = ["adding_products"]
