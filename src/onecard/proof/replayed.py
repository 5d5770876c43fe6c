"""Recordings of all ranks interpreted together, node by node, on one card's values; messages carry what ranks send."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from onecard import recorded
from onecard._torch.names import OpOverload, tree_map, tree_unflatten
from onecard.comm.agree import sparse_check
from onecard.comm.issue import again
from onecard.comm.joined.hub import Arrived, Told
from onecard.comm.joined.worlds import together
from onecard.errors import ProofError
from onecard.proof.given import Values, of_rank
from onecard.proof.running import failed
from onecard.proof.seen import Entry, Held, Value, Watched
from onecard.proof.watch import Watch
from onecard.proof.wide import SCALING, copied, float64, scaled, wide_bits, widened
from onecard.rules.call import schema_of
from onecard.static.code.compiled import below, compiled
from onecard.static.step.memory import Memory
from onecard.static.step.step import Output, Step, Where
from onecard.tensor.spec import Spec


@dataclass(frozen=True)
class Recorded:
    """Recordings that are proved.

    Attributes:
        steps: one of each rank; one: of one card; values: of its inputs, by name.
        count: how many times the step is done, each on what the one before has left.
    """

    steps: tuple[Step, ...]
    one: Step
    values: Values
    count: int = 1

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.steps)

    def both(self, in_float64: bool, keep: bool = True) -> tuple[Watched, list[Watched]]:
        """One card's values, and each rank's.

        Raises:
            ProofError: ranks bring different messages, an operator fails, or numbers that the step asks about are others.
        """
        return self._played((self.one,), in_float64, keep)[0], self._played(self.steps, in_float64, keep)

    def _played(self, steps: Sequence[Step], in_float64: bool, keep: bool) -> list[Watched]:
        players = []
        for rank, step in enumerate(steps):
            names, inputs = of_rank(rank, step, self.values)
            players.append(Player(step, names, copied(inputs, in_float64), self.count, keep, in_float64))

        def call(number: int) -> None:
            sparse_check.on.here = False
            recorded.watcher = players[number]
            players[number].play()

        def listener(number: int, told: Told, tensors: Sequence[Tensor]) -> Arrived | None:
            return players[number].told(told, tensors)

        try:
            with float64() if in_float64 else nullcontext(), torch.random.fork_rng(devices=[]):
                together(len(steps), call, listener)
        except Exception as fault:
            raise failed(fault, "one card" if steps[0] is self.one else f"{len(steps)} ranks") from fault
        return [player.seen for player in players]


class Player(Watch):
    """Interprets one rank's recording, and notes what each node gives.

    Args:
        step: the recording; inputs: of its graph, which it writes to; names: of these on one card.
        count: how often; keep: whether values of nodes are kept; in_float64: dtypes that nodes ask for are wide ones.
    """

    def __init__(
        self, step: Step, names: Sequence[str], inputs: Sequence[Any], count: int, keep: bool, in_float64: bool
    ) -> None:
        super().__init__(keep)
        self.step, self.inputs, self.in_float64 = step, list(inputs), in_float64
        self.names = list(names)
        self._names = {known.where: name for known, name in zip(step.inputs, names, strict=True)}
        self._elsewhere = {known.where for known in step.elsewhere if not known.here}
        self.times, self._node = count, next(iter(step.graph.nodes))
        self._after = _filled_later(step.graph)
        self._specs: dict[fx.Node, Spec | None] = {}
        self._bits: set[fx.Node] = set()  # what comes of a float's bits
        self.gradients: dict[Where, tuple[Any, Spec | None]] = {}
        self.made: dict[Where, tuple[Any, Spec | None]] = {}

    def play(self) -> None:
        """Do the step as often as is asked, each time on what the time before has left."""
        self._held("initial", ("parameter", "state"))
        returned = []
        for number in range(self.times):
            self._ask()
            with below():
                out = self._run()
            self._settle(out)
            self._gradients()
            self.seen.steps = number + 1
            returned.append(self._returned(out))
        self.seen.returned = returned[0] if self.times == 1 else returned
        self._held("final", ("parameter", "state"))
        self._held("buffer", ("buffer",))
        for where, (x, spec) in self.made.items():
            if where[0] == "state" and where not in self._names:
                self._hold_as(where, "final", x, spec)

    # -- the graph ---------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.step.conditions is None:
            return
        found = tuple(compiled(self.step.conditions)(*self.inputs))
        if found != tuple(self.step.answers):
            raise ProofError(
                f"{self.step.name}: numbers that it asks about (in an if, an int()) are others with these values, so that the "
                "recording is not the program's step: record it on values like args="
            )

    def _run(self) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        inputs = iter(self.inputs)
        for node in self.step.graph.nodes:
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
            entry.values[:] = [Value(v.local, _fitting(v.local, s)) for v, s in zip(entry.values, specs, strict=True)]

    def _of_results(self, node: fx.Node, count: int) -> list[Spec | None]:
        """How several results lie, which are told apart by nodes of their own."""
        found: list[Spec | None] = [None] * count
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] < count:
                found[user.args[1]] = None if user in self._after else user.meta.get("spec")
        return found

    def told(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None] | None:
        """A message begins, at the line that the recording says."""
        return super().told(replace(message, source=self._place()[1], operator="", operand=""), given)

    def _message(self, message: Told, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        node, number = self._node, len(self.seen.entries)
        arrived = super()._message(message, given)
        into: Any = node.args[0] if node.target is again.message else None
        spec = self._specs.get(into) if isinstance(into, fx.Node) else None

        def then(tensors: Sequence[Tensor]) -> None:
            arrived(tensors)
            entry = self.seen.entries[number]
            entry.values[:] = [Value(v.local, _fitting(v.local, spec)) for v in entry.values]

        return then

    def _phase(self) -> str:
        return str(self._node.meta.get("phase", "forward"))

    def _place(self) -> tuple[str, str]:
        return str(self._node.meta.get("module") or ""), str(self._node.meta.get("line") or "?")

    # -- what it leaves ----------------------------------------------------------------------------------------------------

    def _settle(self, out: Sequence[Any]) -> None:
        """Put what the step has made into its places, where the next one finds it."""
        for effect in self.step.effects:
            output = effect.output
            value = (None, None) if output is None else (out[output.position], output.spec)
            if effect.kind == "gradient":
                self.gradients[effect.where] = value
            else:
                self.made[effect.where] = value
        for i, known in enumerate(self.step.inputs):
            if known.where in self.made:
                self.inputs[i] = self.made[known.where][0]
            elif known.where[0] == "gradient":
                if known.where[1] in self.gradients:
                    self.inputs[i] = self.gradients[known.where[1]][0]
                else:
                    self.gradients[known.where[1]] = self.inputs[i], known.spec

    def _gradients(self) -> None:
        for where, (x, spec) in self.gradients.items():
            if isinstance(x, Tensor):
                self._hold_as(where, "gradient", x, spec)

    def _held(self, kind: str, kinds: Sequence[str]) -> None:
        for known, x in zip(self.step.inputs, self.inputs, strict=True):
            if known.kind in kinds and isinstance(x, Tensor) and known.where not in self._elsewhere:
                self._hold_as(known.where, kind, x, self.made.get(known.where, (x, known.spec))[1])

    def _hold_as(self, where: Where, kind: str, x: Tensor, spec: Spec | None) -> None:
        name = self._names.get(where) or self.step.name_of(where)
        with self.paused():
            self.seen.held.append(Held(name, kind, self.seen.steps, self._laid(x, spec), sure=True))

    def _laid(self, x: Tensor, spec: Spec | None) -> Value:
        found = self.value(x)
        return Value(found.local, _fitting(found.local, spec), found.made)

    def _returned(self, out: Sequence[Any]) -> Any:
        def shown(result: Any) -> Any:
            if isinstance(result, Output):
                x = out[result.position]
                return self._laid(x, result.spec) if isinstance(x, Tensor) else self.left(x)
            if isinstance(result, tuple) and result[:1] == ("place",):
                i = next((i for i, known in enumerate(self.step.inputs) if known.where == result[1]), None)
                return None if i is None else self._laid(self.inputs[i], self.step.inputs[i].spec)
            return result

        with self.paused():
            return tree_unflatten([shown(result) for result in self.step.results], self.step.tree)


_SCALES = tuple(name.removesuffix("_") for name in SCALING)
_SILENT = (again.message, again.wait, operator.getitem)
"""What makes no value of its own: a message tells of what arrives."""


def _fitting(local: Tensor, spec: Spec | None) -> Spec | None:
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
    memory = Memory(graph)
    found: set[fx.Node] = set()
    filled: frozenset[fx.Node] = frozenset()
    for node in reversed(graph.nodes):
        if node.target in (again.message, again.wait):
            filled |= memory.writes.get(node, frozenset())
        elif memory.roots[node] & filled:
            found.add(node)
    return found
