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
from onecard.static.step.memory import Memory, effects
from onecard.static.step.nodes import traits

_INPUTS = frozenset(["inputs"])  # memory of the program: two inputs may share it


def name_of(node: fx.Node) -> str:
    """An operator's name, "mm"; "" of what is none."""
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""


def only_names(node: fx.Node) -> bool:
    """Whether a node reads no memory: a view, or one of several results. ``contiguous`` and its kin may copy."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not node.target.is_view or traits(node).may_view:
        return False
    return traits(node).views


def only_moves(node: fx.Node) -> bool:
    """Whether a node computes nothing: it names memory, makes it, or copies."""
    return only_names(node) or only_room(node) or traits(node).copies


def only_room(node: fx.Node) -> bool:
    """Whether a node makes memory with nothing in it."""
    return traits(node).room


def sends(node: fx.Node) -> bool:
    """Whether a node may send: messages, and functions of ours that do more than give a result."""
    return node.op == "call_function" and effects(node) and not isinstance(node.target, OpOverload)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers or keys, or raises by what it sees."""
    return node.op == "call_function" and effects(node) and node.target not in (again.message, again.wait)


class Order:
    """The order that a graph's meaning depends on.

    Attributes:
        needs: for each node those that must have run: they make what it reads, read what it overwrites, or wrote there before.
        after: those that it only must not overtake: messages one after the other, draws of random numbers likewise.
        movable: whether nodes may be moved at all; not where an operator changes the shape of a tensor in place.
        memory: who shares memory with whom, results of one operator told apart.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.memory = Memory(graph, apart=True)
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        self.after: dict[fx.Node, list[fx.Node]] = {}
        self.movable = not any(traits(n).reshapes for n in graph.nodes)
        wrote: dict[Any, fx.Node] = {}
        read: dict[Any, list[fx.Node]] = {}
        last: dict[str, fx.Node] = {}
        for node in graph.nodes:
            found = dict.fromkeys(node.all_input_nodes)
            written = self._places(self.memory.writes.get(node, ()))
            for place in () if only_names(node) else self._read(node):
                if place in wrote:
                    found[wrote[place]] = None
                read.setdefault(place, []).append(node)
            for place in written:
                found.update(dict.fromkeys(read.pop(place, ())))
                if place in wrote:
                    found[wrote[place]] = None
                wrote[place] = node
            found.pop(node, None)
            self.needs[node] = [*found]
            kinds = [kind for kind, is_one in (("send", sends), ("draw", draws)) if is_one(node)]
            self.after[node] = [last[kind] for kind in kinds if kind in last]
            last.update(dict.fromkeys(kinds, node))

    def _read(self, node: fx.Node) -> Iterable[Any]:
        return dict.fromkeys(p for n in node.all_input_nodes for p in self._places(self.memory.roots[n]))

    def _places(self, roots: Iterable[fx.Node]) -> list[Any]:
        """Memory, the program's own as one place."""
        return [_INPUTS if r.op == "placeholder" and "tensor" in r.meta else r for r in roots]

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


def check_started(graph: fx.Graph) -> None:
    """What is under way is let alone: between start and wait nobody touches what is filled, or writes to what is sent.

    Raises:
        RecordingError: a pass has moved a node where it must not be. Names it.
    """
    if not any(n.target is again.wait or n.kwargs.get("later") for n in graph.nodes):
        return
    memory = Memory(graph, apart=True)
    filled: dict[fx.Node, frozenset[fx.Node]] = {}
    sent: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is again.wait:
            start: Any = node.args[0]
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
    """The operators that draw, in their order; each is asked once."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    drawing = {target for target, node in {n.target: n for n in calls}.items() if draws(node)}
    return [n.target for n in calls if n.target in drawing]


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
