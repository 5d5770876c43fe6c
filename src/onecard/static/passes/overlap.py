"""Messages started as early and awaited as late as their data allows: what lies between runs while they travel.

All messages keep their order among each other, on every rank the same, so that none can wait for one that comes later: of all
that somebody waits for, the first was started by everybody who is not waiting for an earlier one. Numbers stay as they are.

What a message fills is memory from its start on. It is started before its place only where that does not raise the peak: else all
parameters that are gathered in a step (ZeRO stage 3) would be whole at its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from onecard.comm.issue import again
from onecard.static.passes.adding import nbytes
from onecard.static.price.live import Live
from onecard.static.step.nodes import copied_to
from onecard.static.step.order import Order, only_moves, only_names, only_room

LARGE = 32 * 1024
"""Bytes from which a message on the CPU is worth another thread. Below, it takes less time than starting it."""
AT_ONCE = 4
"""Messages under way, each with the memory of what it sends, before the oldest is awaited."""


def overlapped(graph: fx.Graph) -> fx.Graph:
    """Split messages into start and wait, and move both, with the copies that only they need."""
    if not any(map(_worth, graph.nodes)):
        return graph
    order = Order(graph)
    return _Schedule(graph, order).run() if order.movable else graph


def _worth(node: fx.Node) -> bool:
    if node.target is not again.message or node.kwargs.get("later"):
        return False
    args: Any = node.args
    into, given, name, *_ = args
    device = given.meta["tensor"][3].type
    kept = name == "all_reduce" or into is not given
    return bool(kept and (device != "cpu" or nbytes(given) >= LARGE))


class _Schedule:
    """The nodes once more: messages as soon as they can; waits, copies of what they fill, empty memory and names where they are
    needed; others as before."""

    def __init__(self, graph: fx.Graph, order: Order) -> None:
        self.graph, self.order, self.made = graph, order, fx.Graph()
        self.names: dict[fx.Node, fx.Node] = {}
        self.under_way: dict[fx.Node, int] = {}  # how much was there when they were started
        self.late: dict[fx.Node, None] = {}  # copies of what messages fill
        self.work = 0  # nodes so far that compute
        self.messages = [n for n in graph.nodes if _worth(n)]
        self.wants = [self._computed(n) for n in self.messages]
        self.room = _Room(graph)
        self.now: fx.Node = next(iter(graph.nodes))  # where the walk is

    def run(self) -> fx.Graph:
        for node in self.graph.find_nodes(
            op="placeholder"
        ):  # a message that needs inputs alone comes after all of them
            self._emit(node)
        for node in self.graph.nodes:
            self.now = node
            while self.under_way and not self.room.there(node):
                self._wait(next(iter(self.under_way)))
            if node.op == "output":
                self._emit_late()
                self._emit(node)
            elif node not in self.names and not self._can_wait(node):
                self._emit(node)
            self._start_ready()
        return self.made

    def _can_wait(self, node: fx.Node) -> bool:
        """Whether a node is emitted when another one needs it."""
        if only_names(node) or only_room(node):
            return True
        if only_moves(node) and any(self._comes(n) for n in self._made_of(node)):
            self.late[node] = None
            return True
        return False

    def _comes(self, node: fx.Node) -> bool:
        return node in self.under_way or (node in self.late and node not in self.names)

    def _made_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a node needs, besides names."""
        for n in self.order.needs[node]:
            yield from self._made_of(n) if only_names(n) else (n,)

    def _emit_late(self) -> None:
        for node in self.late:
            if node not in self.names:
                self._emit(node)
        for message in [*self.under_way]:
            self._wait(message)

    def _computed(self, message: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
        """What a message needs, and the copies between that and the message, which can be made earlier."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        waiting = [message]
        while waiting:
            for n in self.order.before(waiting.pop()):
                if n in seen:
                    continue
                seen.add(n)
                if n.op == "call_function" and only_moves(n):
                    waiting.append(n)
                elif n.op == "call_function":
                    found.add(n)
        return found, seen - found

    def _start_ready(self) -> None:
        while self.messages:
            message = self.messages[0]
            if message not in self.names:
                computed, copies = self.wants[0]
                if any(n not in self.names for n in computed):
                    return
                if not self.room.taken(message, [message, *(n for n in copies if n not in self.names)], self.now):
                    return
                self._emit(message)
            self.messages.pop(0)
            self.wants.pop(0)

    def _emit(self, node: fx.Node) -> None:
        for n in self.order.before(node):
            if n not in self.names:
                self._emit(n)
        for n in self.order.needs[node]:
            if n in self.under_way and not only_names(node):
                self._wait(n)
        self.names[node] = made = copied_to(self.made, node, self.names.__getitem__)
        if _worth(node) and node.op == "call_function":
            made.kwargs = {**made.kwargs, "later": True}
            self.under_way[node] = self.work
            self.room.held += self.room.live.freed(node)
            if len(self.under_way) > AT_ONCE:
                self._wait(next(iter(self.under_way)))
        elif node.op == "call_function" and not only_moves(node):
            self.work += 1

    def _wait(self, message: fx.Node) -> None:
        begun = self.under_way.pop(message)
        self.room.held -= self.room.live.freed(message)
        start = self.names[message]
        if begun == self.work and next(iter(reversed(self.made.nodes))) is start:  # nothing to do in between
            start.kwargs = {k: v for k, v in start.kwargs.items() if k != "later"}
            return
        args: Any = message.args
        into, given = self.names[args[0]], self.names[args[1]]
        made = self.made.call_function(again.wait, (start, into, given))
        made.meta.update({k: v for k, v in message.meta.items() if k not in ("tensor", "spec")})


class _Room:
    """Memory between what is alive and the peak, in the order that the graph had."""

    def __init__(self, graph: fx.Graph) -> None:
        self.live = Live(graph)
        self.alive = [self.live.during[n] for n in graph.nodes]
        self.at = {n: i for i, n in enumerate(graph.nodes)}
        self.held = 0  # what messages that are under way still send, and nobody uses after them
        self.none_until = -1  # there is no room for the message that was asked for last, up to this place

    def there(self, node: fx.Node) -> bool:
        """Whether there is room for what messages hold while a node runs."""
        return self.alive[self.at[node]] + self.held <= self.live.peak

    def taken(self, message: fx.Node, nodes: list[fx.Node], now: fx.Node) -> bool:
        """Whether there is room for what these nodes, a message and copies, make from here to their place; then it is taken."""
        start, place = self.at[now], self.at[message]
        if start <= self.none_until < place:
            return False
        more = self.live.made_less_freed(nodes)
        full = (i for i in range(place - 1, start - 1, -1) if more > 0 and self.alive[i] + more > self.live.peak)
        self.none_until = next(full, -1)
        if self.none_until >= 0:
            return False
        for i in range(start, place):
            self.alive[i] += more
        return True
