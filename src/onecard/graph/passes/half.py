"""Automatic mixed precision: products of float32 in bfloat16. All else, the loss and the weights stay float32."""

from __future__ import annotations

import torch
from torch import fx

from onecard.graph.memory import Memory
from onecard.graph.order import name_of
from onecard.graph.passes._new import added

aten = torch.ops.aten
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addbmm", "convolution"}


def products_in_half(graph: fx.Graph) -> fx.Graph:
    """Operands are rounded once each, where they are used first and not written to; results are float32 again."""
    found = {n for n in graph.nodes if name_of(n) in _PRODUCTS and _single(n)}
    if not found:
        return graph
    memory = Memory(graph, apart=True)
    made, names, rounded = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def half(n: fx.Node) -> fx.Node:
        known = rounded.get(n)
        if known is None:
            known = added(made, names[n], aten._to_copy.default, names[n], dtype=torch.bfloat16)
            if memory.steady(n):
                rounded[n] = known
        return known

    for node in graph.nodes:
        if node in found:
            args = fx.map_arg(node.args, half)
            product = added(made, node, node.target, *args, **dict(node.kwargs))
            names[node] = added(made, node, aten._to_copy.default, product, dtype=torch.float32)
            names[node].meta.update(node.meta)
        else:
            names[node] = made.node_copy(node, names.__getitem__)
            names[node].name = node.name if node.op == "placeholder" else names[node].name
    return made


def _single(node: fx.Node) -> bool:
    """Whether all tensors of a node are float32."""
    facts = [n.meta.get("tensor") for n in (node, *node.all_input_nodes)]
    return all(f is not None and f[2] is torch.float32 for f in facts)
