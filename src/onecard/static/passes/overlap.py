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

from onecard._torch.graphs import in_order
from onecard.comm.issue import again
from onecard.static.passes.adding import nbytes
from onecard.static.passes.draft import editing, order_of, without
from onecard.static.passes.row_halves import Beside, join, split
from onecard.static.price.live import Live
from onecard.static.step.nodes import called
from onecard.static.step.order import Order, only_moves, only_names, only_room

LARGE = 32 * 1024
"""Bytes from which a message on the CPU is worth another thread. Below, it takes less time than starting it."""
AT_ONCE = 4
"""Messages under way, each with the memory of what it sends, before the oldest is awaited."""


@editing
def overlapped(graph: fx.Graph) -> bool:
    """Split messages into start and wait, and move both, with the copies that only they need."""
    halves = split(graph, LARGE)
    messages = [n for n in graph.nodes if n in halves or (n.target is again.message and _worth(n))]
    order = order_of(graph) if messages else None
    if order is None or not order.movable:
        join(halves)
        return False
    _Schedule(graph, order, messages, halves).run()
    return True


def _worth(node: fx.Node) -> bool:
    """Whether a message is worth a start and a wait."""
    if node.kwargs.get("later"):
        return False
    args: Any = node.args
    into, given, name, *_ = args
    device = given.meta["tensor"][3].type
    kept = name == "all_reduce" or into is not given
    return bool(kept and (device != "cpu" or nbytes(given) >= LARGE))


class _Schedule:
    """The nodes in another order: messages as soon as they can; waits, copies of what they fill, empty memory and names where
    they are needed; others as before."""

    def __init__(self, graph: fx.Graph, order: Order, messages: list[fx.Node], halves: dict[fx.Node, fx.Node]) -> None:
        self.graph, self.order = graph, order
        self.halves, self.second_halves, self.beside = halves, frozenset(halves.values()), Beside(order, halves)
        self.made: dict[fx.Node, None] = {}  # the nodes in their new order, with the waits
        self.worth = frozenset(messages)
        self.at_once: set[fx.Node] = set()  # messages with nothing to do beside them
        self.under_way: dict[fx.Node, int] = {}  # how much was there when they were started
        self.late: dict[fx.Node, None] = {}  # copies of what messages fill
        self.work = 0  # nodes so far that compute
        self.messages = messages
        self.wants = [self._computed(n) for n in self.messages]
        self.room = _Room(graph)
        self.now: fx.Node = next(iter(graph.nodes))  # where the walk is

    def run(self) -> None:
        for node in self.graph.find_nodes(
            op="placeholder"
        ):  # a message that needs inputs alone comes after all of them
            self._emit(node)
        for node in [*self.graph.nodes]:  # waits are put at its end
            self.now = node
            while self.under_way and not self.room.there(node):
                self._wait(next(iter(self.under_way)))
            if node.op == "output":
                self._emit_late()
                self._emit(node)
            elif node not in self.made and not self._can_wait(node):
                self._emit(node)
            self._start_ready()
        for message in self.worth - self.at_once - {*self.halves}:
            message.kwargs = {**message.kwargs, "later": True}
        whole = {first: call for first, call in self.halves.items() if first in self.at_once}
        for first in whole:
            del self.made[first]
        join(whole)
        without({}, [n for n in self.graph.nodes if n not in self.made])  # names and room that nobody needs
        in_order(self.graph, self.made)

    def _can_wait(self, node: fx.Node) -> bool:
        """Whether a node is emitted when another one needs it."""
        if only_names(node) or only_room(node):
            return True
        if node in self.second_halves or (self.halves and self.beside.holds(node, self.under_way, self.made)):
            self.late[node] = None
            return True
        if only_moves(node) and any(self._comes(n) for n in self._made_of(node)):
            self.late[node] = None
            return True
        return False

    def _comes(self, node: fx.Node) -> bool:
        return node in self.under_way or (node in self.late and node not in self.made)

    def _made_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a node needs, besides names."""
        for n in self.order.needs[node]:
            yield from self._made_of(n) if only_names(n) else (n,)

    def _emit_late(self) -> None:
        for node in self.late:
            if node not in self.made:
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
            if message not in self.made:
                computed, copies = self.wants[0]
                if any(n not in self.made for n in computed):
                    return
                if not self.room.taken(message, [message, *(n for n in copies if n not in self.made)], self.now):
                    return
                self._emit(message)
            self.messages.pop(0)
            self.wants.pop(0)

    def _emit(self, node: fx.Node) -> None:
        for n in (*self.order.needs[node], *self.order.after[node]):
            if n not in self.made:
                self._emit(n)
        for n in self.order.needs[node] if self.under_way else ():
            if n in self.under_way and not only_names(node):
                self._wait(n)
        if node in self.made:  # the second half of what it had to wait for
            return
        self.made[node] = None
        if node in self.worth:
            self.under_way[node] = self.work
            self.room.held += self.room.live.freed(node)
            if len(self.under_way) > AT_ONCE:
                self._wait(next(iter(self.under_way)))
        elif node.op == "call_function" and not only_moves(node):
            self.work += 1

    def _wait(self, message: fx.Node) -> None:
        begun = self.under_way.pop(message)
        self.room.held -= self.room.live.freed(message)
        if begun == self.work and next(reversed(self.made)) is message:  # nothing to do in between
            self.at_once.add(message)
        if message in self.halves:
            self._emit(self.halves[message])
            return
        if message in self.at_once:
            return
        wait = called(self.graph, again.wait, (message, *message.args[:2]))
        wait.meta.update({k: v for k, v in message.meta.items() if k not in ("tensor", "spec")})
        self.made[wait] = None


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
