"""A backward in two halves: the gradients of the inputs now (I), those of the weights later (W). No operator runs twice.

A graph has *junctions*: nodes through which the gradient of an input passes and which also have a weight beside them. I runs the
graph for the inputs alone and notes the gradient that reaches each junction; W starts at the junctions, with what was noted,
and ends at the weights. Between the halves the graph stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from onecard._torch import names as _torch

Leaves = dict[int, Tensor]  # by identity: tensors compare by value


def whole_backward(edges: Sequence[Any], grads: Sequence[Tensor], keep: bool = False) -> None:
    """B: the gradients of everything, added to ``grad`` of the leaves. ``keep``: other stages may need parts of the graph."""
    if edges:
        torch.autograd.backward(list(edges), list(grads), retain_graph=keep)


def input_half(edges: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> WeightHalf:
    """I: the gradients of ``inputs``, added to their ``grad``; returns what W has to do.

    Where no input wants a gradient (the first stage) all is done at once: nobody waits for it, and the graph is freed. So it is
    where torch's reentrant checkpointing recomputes, which takes no part of a backward, and for weights beside a custom
    ``autograd.Function``, whose backward makes both gradients in one piece.

    Args:
        edges: gradient edges of the outputs.
        grads: a gradient for each.
        inputs: leaves.
    """
    if not edges:
        return WeightHalf([])
    graph = _Graph([edge.node for edge in edges], inputs)
    if not any(graph.passes[edge.node] for edge in edges) or graph.recomputes:
        whole_backward(edges, grads)
        return WeightHalf([])
    groups, at_once = graph.groups()
    notes: dict[Any, Sequence[Tensor | None]] = {}
    hooks = [node.register_prehook(_noting(notes, node)) for group in groups for node in group.junctions]
    try:
        torch.autograd.backward(list(edges), list(grads), retain_graph=True, inputs=[*inputs, *at_once.values()])
    finally:
        for hook in hooks:
            hook.remove()
    for group in groups:
        group.start(notes, edges, grads)
    return WeightHalf(groups)


class WeightHalf:
    """What is left of a backward after its I."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def run(self) -> None:
        """W: the gradients of the weights, added to their ``grad``. Once."""
        groups, self._groups = self._groups, []
        # A weight that is used twice needs the graph between its uses, of which the others free parts.
        for group in sorted(groups, key=lambda g: -len(g.junctions)):
            group.run()


def _noting(notes: dict[Any, Sequence[Tensor | None]], node: Any) -> Any:
    def note(grads: Sequence[Tensor | None]) -> None:
        notes[node] = tuple(grads)

    return note


class _Group:
    """Junctions that have weights in common, with all their weights; nearly always one junction."""

    def __init__(self, junctions: list[Any], roots: list[Any], weights: Leaves) -> None:
        self.junctions, self.roots, self.weights = junctions, roots, weights
        self._starts: list[tuple[Any, Tensor]] = []
        self._notes: dict[Any, Sequence[Tensor | None]] = {}

    def start(self, notes: dict[Any, Sequence[Tensor | None]], edges: Sequence[Any], grads: Sequence[Tensor]) -> None:
        self._notes = {node: notes[node] for node in self.junctions if node in notes}
        for node, noted in self._notes.items():
            self._starts += [(GradientEdge(node, k), grad) for k, grad in enumerate(noted) if grad is not None]
        self._starts += [(e, g) for e, g in zip(edges, grads, strict=True) if any(e.node is r for r in self.roots)]

    def run(self) -> None:
        if not self._starts or self._add_product():
            return
        several = len(self.junctions) > 1
        # On the way from one use of a weight to the next, what arrives there is replaced by what I noted, which contains it.
        hooks = [n.register_prehook(_giving(noted)) for n, noted in self._notes.items()] if several else []
        try:
            torch.autograd.backward(
                [edge for edge, _ in self._starts],
                [grad for _, grad in self._starts],
                retain_graph=several,
                inputs=list(self.weights.values()),
            )
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _add_product(self) -> bool:
        """Add the gradients of a linear layer where they are kept, without a product of its own; whether this is one.

        The same as the graph's, but for its hooks: where somebody listens the graph runs.
        """
        linear = _linear(self.junctions[0]) if len(self.junctions) == 1 and not self.roots else None
        if linear is None:
            return False
        x, weight, bias = linear
        ((_, grad),) = self._starts
        mine = [weight] if bias is None else [weight, bias]
        if {id(p) for p in mine} != set(self.weights) or not all(_adds_up(p, grad) for p in mine):
            return False
        weight.grad.addmm_(grad.t(), x)  # type: ignore[union-attr]
        if bias is not None:
            bias.grad.add_(grad.sum(0))  # type: ignore[union-attr]
        return True


def _linear(node: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The input, the weight and the bias of a node that is ``input @ weight.t() + bias``."""
    known = {"AddmmBackward0": ("mat1", 2), "MmBackward0": ("self", 1)}.get(node.name())
    if known is None:
        return None
    name, at = known
    turned, x = node.next_functions[at][0], _torch.saved_tensor(node, name)
    if x is None or turned is None or turned.name() != "TBackward0":
        return None
    weight: Tensor | None = getattr(turned.next_functions[0][0], "variable", None)
    if weight is None or at == 1:
        return None if weight is None else (x, weight, None)
    bias: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    plain = bias is not None and bias.shape == weight.shape[:1] and not _torch.has_factors(node)
    return (x, weight, bias) if plain else None


def _adds_up(p: Tensor, grad: Tensor) -> bool:
    """Whether a leaf's gradient is there to be added to, and nobody is told of what is added."""
    found = _torch.gradient(p)
    plain = type(p) in (Tensor, nn.Parameter) and type(found) is Tensor and type(grad) is Tensor
    return plain and not _torch.has_listeners(p) and found.layout is torch.strided and found.dtype is grad.dtype


def _giving(noted: Sequence[Tensor | None]) -> Any:
    return lambda grads: noted


class _Graph:
    """What lies below the outputs: through which nodes the gradient of an input passes, and which weights lie beside."""

    def __init__(self, roots: list[Any], inputs: Sequence[Tensor]) -> None:
        self.roots = roots
        self.passes: dict[Any, bool] = {}
        self._inputs = {id(x) for x in inputs}
        self._below: dict[Any, list[Any]] = {}
        self._weights: dict[Any, Leaves] = {}  # of nodes through which no input's gradient passes
        self._survey()

    def _survey(self) -> None:
        """Depth first, without recursion: graphs are deeper than Python's stack."""
        stack = [(node, False) for node in self.roots]
        while stack:
            node, seen = stack.pop()
            if seen:
                self._judge(node)
            elif node not in self._below:
                self._below[node] = [f for f, _ in node.next_functions if f is not None]
                stack.append((node, True))
                stack += [(below, False) for below in self._below[node]]

    def _judge(self, node: Any) -> None:
        below = self._below[node]
        variable = None if below else getattr(node, "variable", None)
        is_input = variable is not None and id(variable) in self._inputs
        self.passes[node] = is_input or any(self.passes[n] for n in below)
        if not self.passes[node]:
            mine = {} if variable is None else {id(variable): variable}
            for n in below:
                mine |= self._weights[n]
            self._weights[node] = mine

    @property
    def recomputes(self) -> bool:
        """Whether ``torch.utils.checkpoint(..., use_reentrant=True)`` is in it."""
        return any(node.name() == "CheckpointFunctionBackward" for node in self.passes)

    def _beside(self, node: Any) -> Leaves:
        found: Leaves = {}
        for below in self._below[node]:
            if not self.passes[below]:
                found |= self._weights[below]
        return found

    def groups(self) -> tuple[list[_Group], Leaves]:
        """The groups of junctions, and the weights whose gradients are made with those of the inputs."""
        at_once: Leaves = {}
        found: list[tuple[list[Any], list[Any], Leaves]] = []
        for node, passes in self.passes.items():
            weights = self._beside(node) if passes else self._weights[node] if node in self.roots else {}
            if weights and passes and isinstance(node, BackwardCFunction):
                at_once |= weights
            elif weights:
                found.append(([node], [], weights) if passes else ([], [node], weights))
        groups: list[_Group] = []
        for junctions, roots, weights in _joined(found):
            rest = {key: w for key, w in weights.items() if key not in at_once}
            if rest:
                groups.append(_Group(junctions, roots, rest))
        return groups, at_once


def _joined(found: list[tuple[list[Any], list[Any], Leaves]]) -> list[tuple[list[Any], list[Any], Leaves]]:
    """The same with those joined that have a weight in common."""
    home: dict[int, int] = {}
    made: dict[int, tuple[list[Any], list[Any], Leaves]] = {}
    for number, (junctions, roots, weights) in enumerate(found):
        here = (list(junctions), list(roots), dict(weights))
        for other in {home[key] for key in weights if key in home}:
            old = made.pop(other)
            here[0].extend(old[0])
            here[1].extend(old[1])
            here[2].update(old[2])
        made[number] = here
        home |= dict.fromkeys(here[2], number)
    return list(made.values())
