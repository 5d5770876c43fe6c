"""How a plain model's parameters and activations lie along tp: found over the factors of its operators' rules, exactly.

Each operator of forward may cut any factor that its rule leaves free, or do all of its work on every rank; each tensor may come
to lie otherwise between two of them, at the price of a message forward, and one backward. What is cheapest together is found by
elimination. No name of a layer counts.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx, nn

from onecard._torch.names import OpOverload
from onecard.machine.cost import Machine
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.planning.fold import Folded
from onecard.planning.lines import AxisLine
from onecard.planning.pieces import Pieces
from onecard.planning.plan import Plan
from onecard.planning.search.eliminate import Problem
from onecard.planning.search.kinds import FIRST, NEVER, PENDING, READ, WHOLE, Costs
from onecard.planning.search.outputs import Lies, outputs_of, patterns_of
from onecard.planning.state import TrainingState
from onecard.rules.decide import strategies
from onecard.rules.registry import find
from onecard.static.price.live import size_of
from onecard.static.price.price import call_of, operator_seconds, work

Placements = tuple[tuple[str, str], ...]
BACK = 2.0
"""What backward takes beside forward: a product has two gradients."""
SCARCE = 1000.0
"""By how much more what a rank keeps counts where memory is scarce."""
WEIGHTS = ((1.0, 0.0), (1.0, 3.0), (SCARCE, 0.0), (SCARCE, SCARCE))
"""Of parameters and their states, and of what forward keeps for backward, in times that a rank copies it: for time alone; less is
kept where no more is sent for it (a sum is divided, and gathered later); and where memory is scarce, for either and for both."""
SMALL = 2**14
"""Elements of a parameter that is too small for that."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run an operator: the kinds of its operands and results; whether the work is divided."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    shared: bool
    more: float = 0.0


def placements_for(
    pieces: Pieces,
    folded: Sequence[Folded],
    model: nn.Module,
    ranks: int,
    machine: Machine,
    plan: Plan,
    pins: Mapping[str, str] | None = None,
) -> list[tuple[Placements, Placements]]:
    """Placements along tp, by name: of parameters, and of the outputs of modules that do not lie as their operators leave them;
    those of least time, and those of less memory if they are others.

    Args:
        pieces: forward and backward on one card; folded: the blocks that were left out of them.
        model: whole, for its names. ranks: along tp. plan: the other axes. pins: placements that are given, by name.

    Returns:
        Nothing where nothing is gained by tp.
    """
    line = AxisLine("tp", machine, ranks, 1, plan.per_host)
    found: list[tuple[Placements, Placements]] = []
    pinned = {name: FIRST + int(text.split("(")[1][:-1]) for name, text in (pins or {}).items()}
    for weights in WEIGHTS:
        placing = _Placing(pieces, Costs(line, plan.microbatches), machine, plan, *weights, pinned, folded)
        kinds, lies = placing.solve()
        named = _named(kinds, folded, model)
        outputs = patterns_of(outputs_of(pieces, lies), partial(_pattern, folded=folded), model) if named else ()
        # What the dispatcher makes of the parameters by itself may be better than what the problem knows of it: the price tells.
        for each in dict.fromkeys((outputs, ())) if named else ():
            if (named, each) not in found:
                found.append((named, each))
    return found


@dataclass
class _Placing:
    """The problem of one model along one axis."""

    pieces: Pieces
    costs: Costs
    machine: Machine
    plan: Plan
    weight: float
    weight_kept: float
    pinned: Mapping[str, int]
    folded: Sequence[Folded]
    problem: Problem = field(default_factory=Problem)
    at: dict[fx.Node, int] = field(
        default_factory=dict
    )  # the variable of a tensor: how it lies once it is made and moved
    made: dict[fx.Node, tuple[int, Sequence[int]]] = field(default_factory=dict)  # and how it was made
    may: dict[fx.Node, list[int]] = field(default_factory=dict)
    parameters: dict[fx.Node, tuple[str, int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = ProcessMesh(list(range(self.costs.line.count)), ["tp"])
        self.often = self.costs.often
        recording = self.pieces.recording
        placeholders = [n for n in recording.graph.nodes if n.op == "placeholder"]
        self.trained = {effect.where for effect in recording.effects if effect.kind == "gradient"}
        self.requires: set[fx.Node] = set()
        for node, known in zip(placeholders, recording.inputs, strict=True):
            if "tensor" not in node.meta:
                continue
            if known.kind == "parameter":
                self._parameter(node, ".".join(map(str, known.where[2:])), known.where in self.trained)
            else:
                self._tensor(node, [WHOLE], [0.0])
        for node in self.pieces.nodes:
            if self.pieces.is_forward(node) and node.target is not operator.getitem:
                self._operator(node)

    # -- variables -------------------------------------------------------------------------------------------------------

    def _kinds(self, node: fx.Node) -> list[int]:
        """How a tensor may lie."""
        shape = node.meta["tensor"][0]
        divided = [FIRST + d for d, size in enumerate(shape) if size and size % self.costs.line.count == 0]
        return [WHOLE, *([READ] if node in self.requires else []), PENDING, *divided]

    def _tensor(self, node: fx.Node, made: Sequence[int], each: Sequence[float], maker: int | None = None) -> None:
        """A tensor that is made in one of these kinds, and may be moved once."""
        self.may[node] = self._kinds(node)
        self.at[node] = self.problem.variable(len(self.may[node]))
        scale = self._scale(node)
        table = [
            [cost + scale * self._change(node, kind, new) for new in self.may[node]]
            for kind, cost in zip(made, each, strict=True)
        ]
        maker = self.problem.variable(len(made)) if maker is None else maker
        self.made[node] = maker, made
        self.problem.add((maker, self.at[node]), table)
        if (
            self.weight_kept
            and size_of(node) >= SMALL
            and any(user in self.pieces.at and not self.pieces.is_forward(user) for user in node.users)
        ):
            whole = scale * self.weight_kept * self.machine.copy(size_of(node))
            share = [1 / self.costs.line.count if kind >= FIRST else 1.0 for kind in self.may[node]]
            self.problem.add((self.at[node],), [whole * part for part in share])

    def _parameter(self, node: fx.Node, name: str, trained: bool) -> None:
        """Whole or divided: what a rank keeps it updates, and sums over dp."""
        if trained:
            self.requires.add(node)
        shape = node.meta["tensor"][0]
        ways = [WHOLE, *(FIRST + d for d, size in enumerate(shape) if size and size % self.costs.line.count == 0)]
        before = name
        for blocks in self.folded:
            before = blocks.before(before)
        ways = [self.pinned[before]] if before in self.pinned else ways
        variable = self.problem.variable(len(ways))
        whole = self._kept(node) if trained else 0.0
        self.parameters[node] = name, variable, ways
        scale = self.pieces.alike[self.pieces.owners.get(node, 0)]
        self.problem.add(
            (variable,), [scale * (whole if way == WHOLE else whole / self.costs.line.count) for way in ways]
        )
        self._tensor(node, ways, [0.0] * len(ways), variable)

    def _kept(self, node: fx.Node) -> float:
        elements = size_of(node) // node.meta["tensor"][2].itemsize
        state = TrainingState(self.plan, self.machine)
        sums = state.line.seconds("all_reduce", elements * 4) if state.shards > 1 else 0.0
        weight = self.weight if elements >= SMALL else 1.0
        return weight * (self.machine.copy(elements * 28) + sums)

    def _scale(self, node: fx.Node) -> int:
        return self.pieces.alike[self.pieces.at.get(node, self.pieces.owners.get(node, 0))]

    def _change(self, node: fx.Node, old: int, new: int) -> float:
        return self.costs.change(size_of(node), old, new, node in self.requires)

    # -- operators -------------------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> None:
        results = self._results(node)
        if not isinstance(node.target, OpOverload):
            for result in results:
                self._tensor(result, [WHOLE], [0.0])
            return
        call, given = call_of(node)
        trains = any(x in self.requires for x in given)
        for result in results:
            if trains and result.meta["tensor"][2].is_floating_point:
                self.requires.add(result)
        ways = list(self._ways(call, given, results))
        seconds = operator_seconds(node, self.machine, work(node)) * (1 + BACK * trains)
        scale = self._scale(node)
        chosen = self.problem.variable(len(ways))
        share = 1 / self.costs.line.count
        self.problem.add(
            (chosen,), [scale * self.often * seconds * (share if w.shared else 1.0) + w.more for w in ways]
        )
        for i, x in enumerate(given):
            if x in self.at:
                moved = [[scale * self._change(x, kind, way.operands[i]) for kind in self.may[x]] for way in ways]
                self.problem.add((chosen, self.at[x]), moved)
        for r, result in enumerate(results):
            made = [way.results[r] if r < len(way.results) else WHOLE for way in ways]
            self._tensor(result, made, [0.0] * len(made), chosen)

    @staticmethod
    def _results(node: fx.Node) -> list[fx.Node]:
        if "tensor" in node.meta and node.meta["tensor"] is not None:
            return [node]
        taken = sorted((n for n in node.users if n.target is operator.getitem), key=lambda n: int(n.args[1]))  # type: ignore[arg-type]
        return [n for n in taken if "tensor" in n.meta]

    def _ways(self, call: Any, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> Iterator[_Way]:
        yield _Way((WHOLE,) * len(given), (WHOLE,) * len(results), False)
        row = find(call.func)
        bound = row.bound_for(call) if row is not None else None
        if row is None or bound is None or len(bound.operands) != len(given):
            return
        # Results that nobody takes have no nodes: those that are there are matched by their numbers.
        numbers = [int(n.args[1]) if n.target is operator.getitem else 0 for n in results]  # type: ignore[arg-type]
        if bound.moves and all(x in self.requires for x in given):
            yield _Way((READ,) * len(given), (READ,) * len(results), False)
        seen = set()
        for decision in strategies(bound, self.mesh):
            use = decision.uses[0]
            if use.factor is None and use.op != "sum":
                continue
            made = [_kind(layout) for layout in decision.results]
            taken = [_kind(layout) for layout in decision.operands]
            if max(numbers, default=0) >= len(made):
                continue
            if any(kind is None for kind in (*made, *taken)):
                continue
            operands = tuple(
                READ if k == WHOLE and x in self.requires else k for k, x in zip(taken, given, strict=True)
            )
            way = _Way(operands, tuple(made[n] for n in numbers), use.factor is not None)  # type: ignore[misc, arg-type]
            if way not in seen:
                seen.add(way)
                yield way
        if row.instead is not None:
            yield from self._apart(given, results)

    def _apart(self, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> Iterator[_Way]:
        """An operator that runs as others where a dim that it needs whole is divided, such as a softmax: two small sums."""
        shape = given[0].meta["tensor"][0]
        alike = [x.meta["tensor"][0] == shape for x in (*given, *results)]
        if not all(alike):
            return
        for d, size in enumerate(shape):
            if size and size % self.costs.line.count == 0:
                few = size_of(given[0]) // size
                more = self.often * 3 * self.costs.line.seconds("all_reduce", max(1, few)) * self._scale(results[0])
                yield _Way((FIRST + d,) * len(given), (FIRST + d,) * len(results), True, more)

    # -- the solution ----------------------------------------------------------------------------------------------------

    def solve(self) -> tuple[dict[str, int], dict[fx.Node, Lies]]:
        """The kind of each parameter by its name in the folded model, and how each tensor of forward lies.

        Nothing if no parameter is divided, or it is too large a problem.
        """
        found = self.problem.solve()
        if found is None or found[0] == NEVER:
            return {}, {}
        chosen = found[1]
        kinds = {name: ways[chosen[variable]] for name, variable, ways in self.parameters.values()}
        if all(kind < FIRST for kind in kinds.values()):
            return {}, {}
        divided = {node for node, (_, variable, ways) in self.parameters.items() if ways[chosen[variable]] >= FIRST}
        lies = {}
        for node, (maker, made) in self.made.items():
            if node.op != "placeholder":
                given = node.all_input_nodes[0] if node.target is operator.getitem else node
                by_parameter = any(x in divided for x in given.all_input_nodes)
                lies[node] = Lies(made[chosen[maker]], self.may[node][chosen[self.at[node]]], by_parameter)
        return kinds, lies


def _kind(layout: Layout) -> int | None:
    """How a tensor lies along the one axis; None for ways that parameters and activations do not come in."""
    if layout.merged:
        return None
    if layout.pending:
        return PENDING if layout.pending[0][1] == "sum" else None
    dim = layout.dim_of(0)
    return WHOLE if dim is None else FIRST + dim


# -- names -----------------------------------------------------------------------------------------------------------------


def _named(kinds: dict[str, int], folded: Sequence[Folded], model: nn.Module) -> Placements:
    """Patterns of names of the whole model; what its blocks have is what those between the first and the last one have."""
    also: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        also.setdefault(id(parameter), []).append(name)
    names = [name for group in also.values() for name in group]
    wanted: dict[str, int] = {}
    for name, kind in kinds.items():
        wanted.setdefault(_pattern(name, folded), kind)
    for blocks in folded:
        middle = max(range(len(blocks.alike)), key=lambda i: (blocks.alike[i], i))
        for name, kind in kinds.items():
            if name.startswith(f"{blocks.path}.{middle}."):
                wanted[_pattern(name, folded)] = kind
    patterns = sorted(
        wanted, key=lambda p: (-len(p), p)
    )  # the first that fits counts: a longer name is the more special one
    found = []
    for i, pattern in enumerate(patterns):
        if wanted[pattern] >= FIRST:
            found.append((pattern, f"tp: Shard({wanted[pattern] - FIRST})"))
        elif any(wanted[p] >= FIRST and fnmatch.fnmatchcase(n, p) for n in names if fnmatch.fnmatchcase(n, pattern)
                 for p in patterns[i + 1 :]):  # fmt: skip
            found.append((pattern, "tp: Replicate()"))
    return tuple(found) if any("Shard" in text for _, text in found) else ()


def _pattern(name: str, folded: Sequence[Folded]) -> str:
    for blocks in folded:
        head = f"{blocks.path}."
        if name.startswith(head):
            return f"{blocks.path}.*.{name.removeprefix(head).partition('.')[2]}"
    return name
