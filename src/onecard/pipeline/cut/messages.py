"""Which values cross from rank to rank in a step cut into stages, and when: sent as soon as they are there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from onecard.errors import RecordingError
from onecard.pipeline.cut.parts import part_of
from onecard.pipeline.cut.places import NodeRanks, is_free
from onecard.pipeline.schedule.action import Action, Schedule
from onecard.static.passes.once import words

Tick = tuple[int, int]
"""A rank's time: (0, level) of what runs once before the microbatches, (1, position in its row), (2, level) after them."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one rank sends to another."""

    value: fx.Node
    source: int
    target: int
    sent: Tick
    wanted: Tick


class NodeTimes:
    """When each node runs on each of its ranks.

    Raises:
        RecordingError: a schedule that does the microbatches' gradients out of turn.
    """

    def __init__(self, places: NodeRanks, schedule: Schedule) -> None:
        self.places = places
        self.rows: Sequence[Sequence[Action]] = schedule.compute().ranks
        self._slots: dict[tuple[int, str, int], Tick] = {}
        for row in self.rows:
            for i, (kind, stage, microbatch) in enumerate(row):
                for half in {"B": ("I", "W")}.get(kind, (kind,)):
                    self._slots[stage, half, microbatch] = (1, i)
        self.ticks: dict[fx.Node, Tick] = {}
        begun = False
        for node in places.nodes:
            part = part_of(node)
            if node.op != "call_function" or is_free(node):
                continue
            if part is not None:
                begun = True
                self.ticks[node] = self._slots[part[0], part[1], node.meta["microbatch"]]
            else:
                self.ticks[node] = self._level(node, 2 if begun else 0)

    def _level(self, node: fx.Node, section: int) -> Tick:
        """How many messages of this section have to have come before it."""
        level = 0
        for before in self._reached(node):
            at = self.ticks.get(before)
            if at is not None and at[0] == section and part_of(before) is None:
                hop = not self.places.at[node] <= self.places.at[before]
                level = max(level, at[1] + hop)
        return section, level

    def _reached(self, node: fx.Node) -> set[fx.Node]:
        """What has to be there, through what is made again on the way."""
        found, waiting = set[fx.Node](), [*self.places.order.needs[node]]
        while waiting:
            before = waiting.pop()
            if before not in found:
                found.add(before)
                waiting += self.places.order.needs[before] if is_free(before) else ()
        return found

    def end_of(self, rank: int) -> list[Tick]:
        """All ticks of a rank, in order."""
        levels = {s: max((t[1] for t in self.ticks.values() if t[0] == s), default=-1) + 1 for s in (0, 2)}
        return [
            *((0, i) for i in range(levels[0])),
            *((1, i) for i in range(len(self.rows[rank]))),
            *((2, i) for i in range(levels[2])),
        ]


def crossings(places: NodeRanks, clock: NodeTimes) -> dict[tuple[int, int], list[Crossing]]:
    """For each two ranks what one sends to the other, in the order in which it does.

    Raises:
        RecordingError: what crosses is no tensor.
    """
    wanted: dict[tuple[fx.Node, int], Tick] = {}
    first: dict[tuple[fx.Node, int], fx.Node] = {}
    end = (3, 0)
    (output,) = places.graph.find_nodes(op="output")
    for node in places.nodes:
        if node.op != "call_function" or is_free(node):
            continue
        for given in _operands(node):
            for rank in places.at[node] - places.at[given]:
                key = given, rank
                first.setdefault(key, node)
                wanted[key] = min(wanted.get(key, end), clock.ticks[node])
    for given in output.all_input_nodes:
        if given.op == "call_function" and not is_free(given):
            for rank in places.wanted_at_end.get(given, frozenset()) - places.at[given]:
                wanted.setdefault((given, rank), end)
    found: dict[tuple[int, int], list[Crossing]] = {}
    for (value, rank), tick in wanted.items():
        source = min(places.at[value])
        if "tensor" not in value.meta:
            raise RecordingError(
                f"stages: what {words(value)} gives is no tensor, and another stage needs it: cut before or after both of them"
            )
        sent = _written_last(places, clock, value, first.get((value, rank)), source)
        found.setdefault((source, rank), []).append(Crossing(value, source, rank, sent, tick))
    order: Mapping[fx.Node, int] = {n: i for i, n in enumerate(places.nodes)}
    for each in found.values():
        each.sort(key=lambda c: (c.sent, order[c.value]))
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    """The values that a node needs of others, through what is made again on the way."""
    found, waiting = dict[fx.Node, None](), [*node.all_input_nodes]
    while waiting:
        given = waiting.pop()
        if is_free(given):
            waiting += given.all_input_nodes
        elif given.op == "call_function":
            found[given] = None
    return [*found]


def _written_last(places: NodeRanks, clock: NodeTimes, value: fx.Node, reader: fx.Node | None, source: int) -> Tick:
    """When the last of those that write to a value before it is read there (None: at the end) has run."""
    at = [clock.ticks[value]]
    at += [clock.ticks[n] for n in _writers(places, reader, value) if source in places.at[n] and not is_free(n)]
    return max(at)


def _writers(places: NodeRanks, reader: fx.Node | None, value: fx.Node) -> list[fx.Node]:
    """Those that write to a value before it is read there (None: at the end), in order."""
    roots = places.order.memory.roots[value]
    found = {node for root in roots for node in places.writers.get(root, ()) if reader is None or node < reader}
    return sorted(found)
