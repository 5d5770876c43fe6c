"""Recording: one step as a graph of local operators and messages, with what goes in, what comes out and what it changes.

It holds no tensors and no objects of the program: those are bound to it (``bound.py``), by their places in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from onecard.graph.compiled import compiled
from onecard.tensor.spec import Spec

Where = tuple[Any, ...]
"""A place in the program: ("argument", i), ("parameter" or "buffer", root, path), ("member", root, group, i) of an optimizer,
("gradient", where), ("state", root, group, i, key), ("group", root, group, key, i or None), ("object", root)."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        kind: argument, parameter, buffer, gradient, state, tensor, number, generator or constant.
        name: for people.
        where: its place in the program.
        spec: of the distributed tensor whose local part it is; None of a plain one.
        facts: shape, strides, dtype, device of the local tensor; () of what is no tensor.
    """

    kind: str
    name: str
    where: Where
    spec: Spec | None = None
    facts: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph, as it is given back: a plain tensor or number, or (with ``spec``) a distributed tensor."""

    position: int
    spec: Spec | None = None
    grad: bool = False  # in the program it had a graph of autograd behind it


@dataclass(frozen=True, slots=True)
class Effect:
    """What the step leaves in the program: a gradient, a new state, another local part, a number of an optimizer.

    ``kind``: "gradient" (of ``where``; no ``output``: set to None), "place" (of a distributed tensor), "state", "group".
    """

    kind: str
    where: Where
    output: Output | None = None


@dataclass(slots=True)
class Recording:
    """One step of a program, recorded on this rank.

    Attributes:
        name: of the function.
        graph: an FX graph. Its operators are torch's, on local tensors; messages are nodes of ``comm.again.message``.
            Each node's meta has ``phase`` (forward, backward, optimizer), ``line`` (the user's), ``module``, ``tensor`` (shape,
            strides, dtype, device of the result) and ``spec`` (of the distributed tensor whose part it is).
        inputs: of the graph, in order.
        results: what the function returns: ``Output``s, ("input", i), or constants, in the form ``tree``.
        effects: what it changes in the program besides tensors written in place, which are inputs.
        conditions: comparisons of numbers that must come out as they did.
        roots: names of the modules, optimizers and tensors that places are told by.
        gradients: leaves, with whether they had a gradient before the step.
        constants: tensors made of Python values.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Input, ...]
    results: tuple[Any, ...]
    tree: Any
    effects: tuple[Effect, ...]
    conditions: tuple[Any, ...]
    roots: tuple[str, ...]
    gradients: tuple[tuple[Where, bool], ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    _run: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The graph as a function of its inputs (local tensors, numbers, generators), in order; it writes to them."""
        if self._run is None:
            self._run = compiled(self.graph)
        return self._run

    def nodes(self, phase: str = "") -> Iterator[fx.Node]:
        """The nodes that do something, of one phase or all."""
        for node in self.graph.nodes:
            if node.op == "call_function" and phase in ("", node.meta.get("phase")):
                yield node

    def with_graph(self, graph: fx.Graph) -> Recording:
        """The same step by another graph with the same inputs and outputs."""
        return Recording(
            self.name, graph, self.inputs, self.results, self.tree, self.effects, self.conditions, self.roots,
            self.gradients, self.constants,
        )  # fmt: skip
