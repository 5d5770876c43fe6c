"""Who looks on while the nodes of a graph run one by one: each is an entry, with the line and layout that was recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from onecard import recorded
from onecard._torch.names import OpOverload, tree_map
from onecard.comm.issue import again
from onecard.comm.joined.hub import Told
from onecard.proof.seen import Entry, Value
from onecard.proof.watch import Watch
from onecard.proof.wide import SCALING, scaled, unscaling, wide_bits, widened
from onecard.rules.call import schema_of
from onecard.static.step.memory import GraphMemory
from onecard.tensor.spec import Spec


class NodeWatch(Watch):
    """Looks on while a program runs, and interprets graphs.

    ``in_float64``: dtypes that nodes ask for are wide ones, as graphs were recorded in narrow ones.
    """

    in_float64 = False
    _node: fx.Node | None = None  # that runs now
    _after: set[fx.Node]
    _specs: dict[fx.Node, Spec | None]
    _bits: set[fx.Node]  # what comes of a float's bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._node is not None:  # noted as a node
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    _replayed = False

    def replayed(self, graph: fx.Graph, given: Sequence[Any], roots: Sequence[Any]) -> tuple[Any, ...]:
        """What a recorded step gives that the program replays on some objects."""
        self.replay_begins(roots)
        self._replayed = True
        return self.interpret(graph, given)

    def replays(self) -> bool:
        """Whether the program has replayed a step since this was asked last."""
        was, self._replayed = self._replayed, False
        return was

    def interpret(self, graph: fx.Graph, given: Sequence[Any]) -> tuple[Any, ...]:
        """What a graph gives of its inputs, which it may write to."""
        self._after, self._specs, self._bits = _filled_later(graph), {}, set()
        try:
            return self._run(graph, given)
        finally:
            self._node = None

    def _run(self, graph: fx.Graph, given: Sequence[Any]) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        inputs = iter(given)
        for node in graph.nodes:
            self._node = node
            if node.op == "placeholder":
                values[node] = next(inputs)
                known = node.meta.get("input")
                self._specs[node] = node.meta.get("spec") or (known.spec if known is not None else None)
            elif node.op == "output":
                results: Any = node.args[0]
                return tuple(values[x] if isinstance(x, fx.Node) else x for x in results)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._call(node, args, kwargs)
        return ()

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if self.in_float64 and isinstance(target, OpOverload):
            args, kwargs = tree_map(widened, (args, kwargs))
            kwargs = unscaling(kwargs)
            seen = target is torch.ops.aten.view.dtype and args[0].is_floating_point()
            if seen or any(x in self._bits for x in node.all_input_nodes):
                self._bits.add(node)
                args, kwargs = wide_bits((args, kwargs))
        scales = self.in_float64 and isinstance(target, OpOverload) and schema_of(target).functional.endswith(_SCALES)
        result = scaled(target, args, kwargs) if scales else target(*args, **kwargs)
        self._specs[node] = self._spec(node)
        if target not in _SILENT and self.keep:
            with self.paused():
                self._note_node(node, args, kwargs, result)
        return result

    def _spec(self, node: fx.Node) -> Spec | None:
        """How the result of a node lies: as was noted, or as what it writes to."""
        spec: Spec | None = node.meta.get("spec")
        if spec is None and node.all_input_nodes and _in_place(node):
            return self._specs.get(node.all_input_nodes[0])
        return spec

    def _note_node(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        target: Any = node.target
        if isinstance(target, OpOverload) and schema_of(target).views:
            return
        before = len(self.seen.entries)
        if isinstance(target, OpOverload):
            self._note(target, args, kwargs, result)
        else:
            written = [args[i] for i in recorded.writes.get(target, ())]
            name = getattr(target, "__name__", str(target))
            self.note(name, written, args, kwargs, result, target not in recorded.pure)
        if len(self.seen.entries) == before:
            return
        entry: Entry = self.seen.entries[before]
        specs = [self._specs[node]] if len(entry.values) == 1 else self._of_results(node, len(entry.values))
        if node not in self._after:
            entry.values[:] = [Value(v.local, fitting(v.local, s)) for v, s in zip(entry.values, specs, strict=True)]

    def _of_results(self, node: fx.Node, count: int) -> list[Spec | None]:
        """How several results lie, which are told apart by nodes of their own."""
        found: list[Spec | None] = [None] * count
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] < count:
                found[user.args[1]] = None if user in self._after else user.meta.get("spec")
        return found

    def told(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None] | None:
        """A message begins, at the line that the recording says."""
        if self._node is None:
            return super().told(message, given)
        return super().told(replace(message, source=self._place()[1], operator="", operand=""), given)

    def _message(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        node, number = self._node, len(self.seen.entries)
        arrived = super()._message(message, given)
        if node is None:
            return arrived
        into: Any = node.args[0] if node.target is again.message else None
        spec = self._specs.get(into) if isinstance(into, fx.Node) else None

        def then(tensors: Sequence[Tensor]) -> None:
            arrived(tensors)
            entry = self.seen.entries[number]
            entry.values[:] = [Value(v.local, fitting(v.local, spec)) for v in entry.values]

        return then

    def _phase(self) -> str:
        return super()._phase() if self._node is None else str(self._node.meta.get("phase", "forward"))

    def _place(self) -> tuple[str, str]:
        if self._node is None:
            return super()._place()
        return str(self._node.meta.get("module") or ""), str(self._node.meta.get("line") or "?")


_SCALES = tuple(name.removesuffix("_") for name in SCALING)
_SILENT = (again.message, again.wait, operator.getitem)
"""What makes no value of its own: a message tells of what arrives."""


def fitting(local: Tensor, spec: Spec | None) -> Spec | None:
    """A spec, if a rank's part is what it says."""
    place = None if spec is None else spec.layout.mesh.coordinate()
    if spec is None or place is None:
        return None
    return spec if tuple(local.shape) == tuple(spec.layout.local_shape(spec.shape, place)) else None


def _in_place(node: fx.Node) -> bool:
    target: Any = node.target
    return isinstance(target, OpOverload) and target._schema.is_mutable


def _filled_later(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose result a message fills later, so that it is not yet what its layout says."""
    memory = GraphMemory(graph)
    found: set[fx.Node] = set()
    filled: frozenset[fx.Node] = frozenset()
    for node in reversed(graph.nodes):
        if node.target in (again.message, again.wait):
            filled |= memory.writes.get(node, frozenset())
        elif memory.roots[node] & filled:
            found.add(node)
    return found
