"""The fastest kernel at hand for each product: torch's (MKL), or oneDNN's. For ``kernels="fastest"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onecard._torch import names as _torch
from onecard.static.passes import kernels
from onecard.static.passes.adding import added
from onecard.static.step.nodes import copied_to

aten = torch.ops.aten


def fastest(graph: fx.Graph) -> fx.Graph:
    """Products by the kernel that was fastest when it was measured (``graph/kernels.py``)."""
    found = {n: name for n in graph.nodes if n.op == "call_function" and (name := kernels.kind(n)) is not None}
    times = kernels.times_of([(name, kernels.operands(n)) for n, name in found.items()])
    taken = {n: name for (n, name), t in zip(found.items(), times, strict=True) if kernels.choice(t) == "onednn"}
    if not taken:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in taken:
            names[node] = _by_onednn(node, taken[node], made, names)
        else:
            names[node] = copied_to(made, node, names.__getitem__)
    return made


def _by_onednn(node: fx.Node, name: str, made: fx.Graph, names: dict[fx.Node, fx.Node]) -> fx.Node:
    given: Any = [names[a] for a in node.args if isinstance(a, fx.Node)]
    x, weight, bias = kernels.by_onednn(name, given, lambda w: added(made, node, aten.t.default, w))
    call = made.call_function(_torch.onednn_linear, (x, weight, bias, "none", [], ""))
    call.meta.update(node.meta)
    return call


def table(graph: fx.Graph) -> list[tuple[str, int, dict[str, float]]]:
    """Each product of a graph, how often it is there, and the microseconds of its kernels."""
    found = [(name, kernels.operands(n)) for n in graph.nodes if n.op == "call_function" and (name := kernels.kind(n))]
    counts: dict[str, int] = {}
    for p in found:
        counts[kernels.key(*p)] = counts.get(kernels.key(*p), 0) + 1
    times = {kernels.key(*p): t for p, t in zip(found, kernels.times_of(found), strict=True)}
    return [(k, n, times[k]) for k, n in counts.items()]
