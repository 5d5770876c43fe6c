"""What has to run before what: by data, by memory, and by effects. A pass that moves nodes asks here, and is checked here."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.errors import RecordingError
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.nodes import operator_of, traits
from onecard.static.step.row_calls import START, first_half, only_moves_rows

_INPUTS = frozenset(["inputs"])  # memory of the program: two inputs may share it


def name_of(node: fx.Node) -> str:
    """An operator's name, "mm"; "" of what is none."""
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""


def only_names(node: fx.Node) -> bool:
    """Whether a node reads no memory: a view, or one of several results. ``contiguous`` and its kin may copy."""
    if node.target is operator.getitem:
        return True
    known = operator_of(node)
    return known is not None and known.views and not known.may_view and node.target.is_view  # type: ignore[union-attr]


def reads_none(node: fx.Node) -> bool:
    """Whether nothing that a node is given is read: a view of it, or another tensor of its shape."""
    return only_names(node) or traits(node).shaped


def only_moves(node: fx.Node) -> bool:
    """Whether a node computes nothing: it names memory, makes it, or copies."""
    known = traits(node)
    return known.room or known.copies or only_names(node)


def only_room(node: fx.Node) -> bool:
    """Whether a node makes memory with nothing in it."""
    return traits(node).room


def sends(node: fx.Node) -> bool:
    """Whether a node may send: messages, and functions of ours that do more than give a result."""
    return node.op == "call_function" and operator_of(node) is None and effects(node) and first_half(node) is None


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers or keys, or raises by what it sees."""
    return (
        node.op == "call_function"
        and node.target is not again.message
        and node.target is not again.wait
        and effects(node)
        and not only_moves_rows(node)
    )


class Order:
    """The order that a graph's meaning depends on.

    Attributes:
        needs: for each node those that must have run: they make what it reads, read what it overwrites, or wrote there before.
        after: those that it only must not overtake: messages one after the other, draws of random numbers likewise.
        movable: whether nodes may be moved at all; not where an operator changes the shape of a tensor in place.
        memory: who shares memory with whom, results of one operator told apart.
    """

    def __init__(self, graph: fx.Graph, memory: GraphMemory | None = None) -> None:
        self.memory = memory or GraphMemory(graph, apart=True)
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        self.after: dict[fx.Node, list[fx.Node]] = {}
        self.movable = True
        wrote: dict[Any, fx.Node] = {}
        read: dict[Any, list[fx.Node]] = {}
        last: dict[str, fx.Node] = {}
        roots, writes = self.memory.roots, self.memory.writes
        places: dict[fx.Node, Any] = {n: n for n in graph.nodes}
        places |= {n: self._place(n) for n in graph.find_nodes(op="placeholder")}
        for node in graph.nodes:
            inputs = node.all_input_nodes
            known, found = operator_of(node), dict.fromkeys(inputs)
            self.movable = self.movable and not (known is not None and known.reshapes)
            for place in () if only_names(node) else {places[r]: None for n in inputs for r in roots[n]}:
                if place in wrote:
                    found[wrote[place]] = None
                if place in read:
                    read[place].append(node)
                else:
                    read[place] = [node]
            if node in writes:
                for place in [places[r] for r in writes[node]]:
                    for reader in read.pop(place, ()):
                        found[reader] = None
                    if place in wrote:
                        found[wrote[place]] = None
                    wrote[place] = node
                found.pop(node, None)
            self.needs[node] = [*found]
            self.after[node] = []
            if node.op == "call_function" and (known is None or known.effects):
                kinds = [kind for kind, is_one in (("send", sends), ("draw", draws)) if is_one(node)]
                self.after[node] = [last[kind] for kind in kinds if kind in last]
                last.update(dict.fromkeys(kinds, node))

    def _place(self, given: fx.Node) -> Any:
        """Where an input lies: the program's own memory is one place."""
        return _INPUTS if "tensor" in given.meta else given

    def before(self, node: fx.Node) -> list[fx.Node]:
        """All that must have run before a node."""
        return [*self.needs[node], *self.after[node]]

    def keeps(self, sequence: Iterable[fx.Node]) -> bool:
        """Whether the nodes may run in this order."""
        seen: set[fx.Node] = set()
        for node in sequence:
            if any(n not in seen for n in self.before(node)):
                return False
            seen.add(node)
        return True


def check_defined(graph: fx.Graph) -> None:
    """Each node comes after those that it is given.

    Raises:
        RecordingError: a pass has put one before its data. Names both.
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if not seen.issuperset(inputs):
            missing = next(n for n in inputs if n not in seen)
            raise RecordingError(f"{node.name} runs before {missing.name}, which it is given: a pass has moved it")
        seen.add(node)


def check_started(graph: fx.Graph) -> None:
    """What is under way is let alone: between start and wait nobody touches what is filled, or writes to what is sent.

    Raises:
        RecordingError: a pass has moved a node where it must not be. Names it.
    """
    if not any(n.target is again.wait or n.target is START or n.kwargs.get("later") for n in graph.nodes):
        return
    memory = GraphMemory(graph, apart=True)
    filled: dict[fx.Node, frozenset[fx.Node]] = {}
    sent: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        start: Any = node.args[0] if node.target is again.wait else first_half(node)
        if start is not None:
            if start not in filled:
                raise RecordingError(
                    f"{node.name} waits for a message that is not under way: a pass has lost its start"
                )
            del filled[start], sent[start]
            continue
        if not only_names(node):
            used = frozenset[fx.Node]().union(*(memory.roots[n] for n in node.all_input_nodes))
            written = memory.writes.get(node, frozenset())
            for start in filled:
                if used & filled[start] or written & sent[start]:
                    raise RecordingError(
                        f"{node.name} uses what {start.name} still sends or fills: a pass has moved it"
                    )
        if node.target is again.message and node.kwargs.get("later"):
            into, given = node.args[0], node.args[1]
            filled[node], sent[node] = memory.roots[into], memory.roots[given]
        elif node.target is START:  # what it fills has no name yet
            filled[node] = frozenset()
            sent[node] = frozenset[fx.Node]().union(*(memory.roots[n] for n in node.all_input_nodes))
    if filled:
        raise RecordingError(f"nobody waits for {next(iter(filled)).name}: a pass has lost its wait")


def check_drawn(before: fx.Graph, after: fx.Graph) -> None:
    """Random numbers are drawn as they were: as many, by the same operators, in the same order.

    Raises:
        RecordingError: a pass has baked in, merged, dropped or moved a draw.
    """
    old, new = map(_drawn, (before, after))
    if old != new:
        raise RecordingError(
            f"of {len(old)} random draws and checks there are {len(new)}, or they come in another order: each must be made anew "
            "at every replay"
        )


def _drawn(graph: fx.Graph) -> list[Any]:
    """The operators that draw, in their order; each is asked once, but for calls on rows, of which each is another one."""
    calls = [n for n in graph.nodes if n.op == "call_function" and not only_moves_rows(n)]
    drawing = {target for target, node in {id(n.target): n for n in calls}.items() if draws(node)}
    return [n.target for n in calls if id(n.target) in drawing]


def line_up(graph: fx.Graph) -> dict[Any, list[Any]]:
    """The messages of a graph in their order, as the ranks of each line must agree on them."""
    found: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        if node.target is again.message:
            args: Any = node.args
            _, given, name, rest, line = args
            facts = given.meta["tensor"]
            apart = name == "all_to_all_single"  # each rank has its own sizes there
            words = (name, str(facts[2]), *(() if apart else (math.prod(facts[0]), *map(str, rest))))
            found.setdefault(line, []).append(words)
    return found
