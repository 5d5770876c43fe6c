"""Pieces of a recorded forward and backward: which node belongs to which block, and what each piece takes. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.machine.cost import Machine, sent
from onecard.planning.fold import Folded
from onecard.planning.job import PieceCost
from onecard.planning.lives import PieceLives, lives_of
from onecard.static.price.convolutions import workspace
from onecard.static.price.live import Live, size_of
from onecard.static.price.messages import axis_of, is_message, is_wait, kind_of, waits_for
from onecard.static.price.price import NodeCost, cost
from onecard.static.step.step import RecordedStep

BEFORE, AFTER = "before the blocks", "after the blocks"


@dataclass(slots=True)
class _Spent:
    """What the nodes of a piece take, added up."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    messages: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: Counter[str] = field(default_factory=Counter)
    macs: int = 0
    macs_back: int = 0
    joined: dict[str, tuple[int, float]] = field(default_factory=dict)
    handed: dict[str, tuple[int, float]] = field(default_factory=dict)


def _name(axis: str) -> str:
    """An axis of fleet's grid under the name that plans have for it."""
    return "dp" if axis.startswith("dp+") else {"mp": "tp", "sep": "cp"}.get(axis, axis)


_BOTH = {"aten::linear_backward": 3, "aten::convolution_backward": 10}
"""Operators that give a product's gradients for its input and its weight, and which argument says which are wanted."""


def _of_weights(node: fx.Node) -> float:
    """The share of an operator of backward that a halved backward puts off: of the two gradients of a product, one."""
    target: Any = node.target
    at = _BOTH.get(target._schema.name) if isinstance(target, OpOverload) else None
    if at is None:
        return 0.0
    wanted: Any = node.args[at]
    return 0.5 if wanted[0] and wanted[1] else 0.0


class Pieces:
    """A recording of forward and backward of one microbatch, by pieces.

    Attributes:
        names: of the pieces, in the order of forward; alike: for how many each stands.
        at: for each node the number of its piece.
    """

    def __init__(self, recording: RecordedStep, folded: Sequence[Folded]) -> None:
        self.recording = recording
        self.nodes = list(recording.nodes())
        self._phase = {node: str(node.meta.get("phase", "forward")) for node in self.nodes}
        blocks = self._in_order({name: n for f in folded for name, n in zip(f.names, f.alike, strict=True)})
        self.names = [BEFORE, *blocks, AFTER] if blocks else [BEFORE]
        self.alike = [1, *blocks.values(), 1] if blocks else [1]
        self.at: dict[fx.Node, int] = {}
        self._order = {node: i for i, node in enumerate(self.nodes)}
        self._forward()
        self.owners = self._owners()
        self._trained = {effect.where for effect in recording.effects if effect.kind == "gradient"}
        self._backward()

    @property
    def messages(self) -> bool:
        """Whether any node sends."""
        return any(map(is_message, self.nodes))

    # -- which node is whose ---------------------------------------------------------------------------------------------

    def _in_order(self, blocks: dict[str, int]) -> dict[str, int]:
        """Blocks in the order in which forward comes to them; those that do not run are left out."""
        found: dict[str, int] = {}
        for node in self.nodes:
            if self._phase[node] == "forward" and (name := self._block(node, blocks)) and name not in found:
                found[name] = blocks[name]
        return found

    @staticmethod
    def _block(node: fx.Node, blocks: dict[str, int]) -> str:
        module = str(node.meta.get("module", ""))
        while module:
            if module in blocks:
                return module
            module = module.rpartition(".")[0]
        return ""

    def _forward(self) -> None:
        """Nodes between two blocks belong to the first of them."""
        places = {name: i for i, name in enumerate(self.names)}
        blocks = dict(zip(self.names[1:-1], self.alike[1:-1], strict=True))
        mine = [(node, self._block(node, blocks)) for node in self.nodes if self._phase[node] == "forward"]
        last = max((i for i, (_, name) in enumerate(mine) if name), default=-1)
        now = 0
        for i, (node, name) in enumerate(mine):
            now = len(self.names) - 1 if last >= 0 and i > last else places[name] if name else now
            self.at[node] = now

    def _owners(self) -> dict[fx.Node, int]:
        """For each parameter the piece that uses it first."""
        placeholders = [n for n in self.recording.graph.nodes if n.op == "placeholder"]
        found: dict[fx.Node, int] = {}
        for node, known in zip(placeholders, self.recording.inputs, strict=True):
            if known.kind == "parameter":
                uses = self._uses(node)
                found[node] = min(uses, default=0)
        return found

    def _uses(self, node: fx.Node) -> list[int]:
        """The pieces whose forward uses a node, through views of it too."""
        return [self.at[user] for user in node.users if user in self.at]

    def _backward(self) -> None:
        """Backward goes through the pieces the other way: a node that takes what an earlier piece had begins that piece."""
        uses: dict[fx.Node, list[int]] = defaultdict(list)
        for node, piece in self.at.items():
            for given in node.all_input_nodes:
                uses[given].append(piece)
        now = len(self.names) - 1
        for node in self.nodes:
            if self._phase[node] == "forward":
                continue
            for given in node.all_input_nodes:
                # What one piece made and the next one took is kept for the next one: the latest that has to do with it counts.
                known = [*uses.get(given, ()), *([self.at[given]] if self._phase.get(given) == "forward" else ())]
                if known and max(known) < now:
                    now = max(known)
            self.at[node] = now

    def is_forward(self, node: fx.Node) -> bool:
        """Whether a node runs before backward."""
        return self._phase[node] == "forward"

    @cached_property
    def late(self) -> set[fx.Node]:
        """Nodes of backward that no earlier piece waits for: what gradients of weights need, and nothing else."""
        reach: dict[fx.Node, int] = {}
        found = set()
        for node in reversed(self.nodes):
            if self._phase[node] == "forward":
                continue
            reach[node] = min([self.at[node], *(reach[user] for user in node.users if user in reach)])
            if reach[node] == self.at[node]:
                found.add(node)
        return found

    # -- memory ----------------------------------------------------------------------------------------------------------

    @cached_property
    def live(self) -> Live:
        """What is alive when."""
        return Live(self.recording.graph)

    @cached_property
    def memory(self) -> PieceMemory:
        """What the pieces keep and need."""
        return PieceMemory(self)

    # -- what they take --------------------------------------------------------------------------------------------------

    def costs(self, machine: Machine) -> list[PieceCost]:
        """Of each piece, for one microbatch on a machine."""
        spent = [_Spent() for _ in self.names]
        forward = {node for node in self.nodes if self.is_forward(node)}
        lives = lives_of(self.live, self.nodes, self.at, forward, self.memory.gradient_makers, len(self.names))
        before = 0.0
        priced = cost(self.recording, machine, self.live)
        for node, found in zip(self.nodes, priced.nodes, strict=True):
            self._spend(spent[self.at[node]], node, found, found.then - before)
            before = found.then
        return [self._cost(i, one, lives[i]) for i, one in enumerate(spent)]

    def _spend(self, spent: _Spent, node: fx.Node, found: NodeCost, seconds: float) -> None:
        if self.is_forward(node):
            spent.forward += seconds
            spent.macs += found.products
        else:
            spent.macs_back += found.products
            weights = 1.0 if node in self.late else _of_weights(node)
            spent.backward_weight += weights * seconds
            spent.backward_input += (1 - weights) * seconds
        if is_message(node):
            spent.sent[_name(found.axis)] += found.sent
        if seconds and (is_message(node) or is_wait(node)):
            waited: Any = node.args[0]  # a wait's message
            spent.messages[_name(found.axis or axis_of(waited))] += seconds
        self._join(spent, node, found, seconds)

    def _join(self, spent: _Spent, node: fx.Node, found: NodeCost, seconds: float) -> None:
        """Count a message that sums what an earlier piece has made, or gradients for an earlier piece, and the wait for it."""
        message = waits_for(node) if is_wait(node) else node
        if message is None or not is_message(message) or kind_of(message) != "all_reduce":
            return
        forward = self.is_forward(node)
        others = self._makers(message) if forward else self._readers(message)
        if others and all(self.at.get(other, self.at[message]) < self.at[message] for other in others):
            axis, counted = _name(axis_of(message)), spent.joined if forward else spent.handed
            nbytes, took = counted.get(axis, (0, 0.0))
            counted[axis] = nbytes + found.sent, took + seconds

    def _makers(self, message: fx.Node) -> set[fx.Node]:
        return {block[0] for given in message.all_input_nodes for block in self.live.blocks_of(given)}

    def _readers(self, message: fx.Node) -> set[fx.Node]:
        """Who takes what a message has summed, where it lies, or as a wait gives it; of optimizers and results nobody."""
        summed = {message, *message.all_input_nodes}
        summed |= {user for user in message.users if is_wait(user)}
        here = self._order[message]
        return {user for n in summed for user in n.users if self._order.get(user, -1) > here and user not in summed}

    def _cost(self, i: int, spent: _Spent, lives: PieceLives) -> PieceCost:
        # A product has two gradients, each as much work as itself; what is more is forward, done again.
        again = max(0, spent.macs_back - 2 * spent.macs)
        memory = self.memory
        return PieceCost(
            self.names[i], self.alike[i], spent.forward, spent.backward_input, spent.backward_weight, dict(spent.messages),
            dict(spent.sent), spent.macs + spent.macs_back, again, memory.kept[i], memory.peak[i] - memory.kept[i],
            memory.first[i] - memory.kept[i], memory.output[i], tuple(self.tensors(i)), memory.gradients[i],
            self.frozen(i), self.pending(i), tuple(self.tensors(i, experts=True)), 0 if i else self._batch(), lives,
            spent.joined, spent.handed,
        )  # fmt: skip

    def _batch(self) -> int:
        """Bytes of the step's arguments."""
        return sum(size_of(node) for node, known in self._inputs() if known.kind == "argument")

    def tensors(self, i: int, experts: bool = False) -> Iterator[int]:
        """Elements of each parameter of a piece on this rank; ``experts``: of those alone."""
        placeholders = [n for n in self.recording.graph.nodes if n.op == "placeholder"]
        for node, known in zip(placeholders, self.recording.inputs, strict=True):
            if self.owners.get(node) == i and known.where in self._trained:
                if experts and ".experts." not in str(known.where[-1]):
                    continue
                yield size_of(node) // node.meta["tensor"][2].itemsize

    def pending(self, i: int) -> dict[str, int]:
        """Bytes sent to sum a piece's gradients along axes other than dp, by axis: by the optimizer, once in a step.

        Of a parameter that is divided along the axis a rank gets its part of the sum alone.
        """
        found: Counter[str] = Counter()
        known = {known.where: (self.owners.get(node), known.spec) for node, known in self._inputs()}
        for effect in self.recording.effects:
            if (
                effect.kind != "gradient"
                or effect.output is None
                or effect.output.spec is None
                or known[effect.where][0] != i
            ):
                continue
            layout = effect.output.spec.layout
            for axis, _ in layout.pending:
                name = _name(layout.mesh.dim_names[axis])
                if name != "dp" and layout.mesh.shape[axis] > 1:
                    parameter: Any = known[effect.where][1]
                    kind = "reduce_scatter" if parameter.layout.dim_of(axis) is not None else "all_reduce"
                    given = size_of(_result(self.recording.graph, effect.output.position))
                    found[name] += sent(kind, given, layout.mesh.shape[axis])
        return dict(found)

    def _inputs(self) -> Iterator[tuple[fx.Node, Any]]:
        placeholders = [n for n in self.recording.graph.nodes if n.op == "placeholder"]
        return zip(placeholders, self.recording.inputs, strict=True)

    def frozen(self, i: int) -> int:
        """Elements of a piece's parameters that get no gradient."""
        every = sum(size_of(n) // n.meta["tensor"][2].itemsize for n, piece in self.owners.items() if piece == i)
        return every - sum(self.tensors(i))


class PieceMemory:
    """Bytes of each piece, for one microbatch.

    Attributes:
        kept: of what forward leaves for backward, by the piece whose backward uses it last.
        peak: most of its own bytes at once, what it kept included; first: gradients included, too.
        output: of what forward of later pieces takes.
        gradients: of its parameters, as backward makes them; gradient_makers: the nodes that do.
    """

    def __init__(self, pieces: Pieces) -> None:
        count = len(pieces.names)
        self.kept, self.output, self.gradients = [0] * count, [0] * count, [0] * count
        self._pieces = pieces
        graph = pieces.recording.graph
        order = list(graph.nodes)
        place = {node: i for i, node in enumerate(order)}
        live = pieces.live
        results = {
            block
            for effect in pieces.recording.effects
            if effect.kind == "gradient" and effect.output is not None
            for block in live.blocks_of(_result(graph, effect.output.position))
        }
        changes: dict[int, list[tuple[int | None, int]]] = defaultdict(list)
        made = self.gradient_makers = {block[0] for block in results}
        for maker, size, begin, end in live.spans():
            forward = pieces.is_forward(maker)
            last = order[end]
            if not forward and maker in made and last.op == "output":
                self.gradients[pieces.at[maker]] += size
                changes[begin].append((~pieces.at[maker], size))
                continue
            home = None
            if forward and last.op != "output" and not pieces.is_forward(last):
                home = pieces.at[last]
                self.kept[home] += size
            changes[begin].append((home, size))
            changes[end + 1].append((home, -size))
        self._outputs(live, place)
        self.peak, self.first = self._peaks(order, changes)

    def _outputs(self, live: Live, place: dict[fx.Node, int]) -> None:
        """What a piece makes and a later one takes in forward; memory counts once."""
        pieces = self._pieces
        sizes = {maker: size for maker, size, *_ in live.spans()}
        crossing: dict[fx.Node, int] = {}
        for node in pieces.nodes:
            if not pieces.is_forward(node):
                continue
            for given in node.all_input_nodes:
                for maker, _ in live.blocks_of(given):
                    if maker in sizes and pieces.is_forward(maker) and pieces.at[maker] < pieces.at[node]:
                        crossing[maker] = sizes[maker]
        for maker, size in crossing.items():
            self.output[pieces.at[maker]] += size

    def _peaks(self, order: list[fx.Node], changes: dict[int, list[tuple[int | None, int]]]) -> tuple[list[int], ...]:
        """Of each piece: what is alive while its nodes run, but for what other pieces keep and for parameters; without and with
        the gradients that it has made."""
        pieces, peaks, first = self._pieces, [0] * len(self.kept), [0] * len(self.kept)
        now: Counter[int | None] = (
            Counter()
        )  # by piece; of gradients by its complement; of what no backward needs by None
        for i, node in enumerate(order):
            for home, size in changes.get(i, ()):
                now[home] += size
            if node in pieces.at:
                mine = pieces.at[node]
                own = now[None] + now[mine] + workspace(node)
                peaks[mine] = max(peaks[mine], own)
                first[mine] = max(first[mine], own + now[~mine])
        return peaks, first


def _result(graph: fx.Graph, position: int) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    found: Any = output.args[0]
    return found[position]
