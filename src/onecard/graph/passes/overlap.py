"""Messages started as early and awaited as late as their data allows: what lies between runs while they travel.

All messages keep their order among each other, on every rank the same, so that none can wait for one that comes later: of all
that somebody waits for, the first was started by everybody who is not waiting for an earlier one. Numbers stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from onecard.comm import again
from onecard.graph.order import Order, only_moves, only_names
from onecard.graph.passes._new import nbytes

LARGE = 32 * 1024
"""Bytes from which a message on the CPU is worth another thread. Below, it takes less time than starting it."""


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
    """The nodes once more: waits and names of memory where they are needed, messages as soon as they can, others as before."""

    def __init__(self, graph: fx.Graph, order: Order) -> None:
        self.graph, self.order, self.made = graph, order, fx.Graph()
        self.names: dict[fx.Node, fx.Node] = {}
        self.under_way: dict[fx.Node, int] = {}  # how much was there when they were started
        self.work = 0  # nodes so far that compute
        self.messages = [n for n in graph.nodes if _worth(n)]
        self.wants = [self._computed(n) for n in self.messages]

    def run(self) -> fx.Graph:
        for node in self.graph.find_nodes(
            op="placeholder"
        ):  # a message that needs inputs alone comes after all of them
            self._emit(node)
        for node in self.graph.nodes:
            if node.op == "output":
                for message in [*self.under_way]:
                    self._wait(message)
                self._emit(node)
            elif node not in self.names and not only_names(node):
                self._emit(node)
            self._start_ready()
        return self.made

    def _computed(self, message: fx.Node) -> set[fx.Node]:
        """What a message needs besides copies that can be made earlier."""
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
        return found

    def _start_ready(self) -> None:
        while self.messages and (self.messages[0] in self.names or all(n in self.names for n in self.wants[0])):
            message = self.messages.pop(0)
            self.wants.pop(0)
            if message not in self.names:
                self._emit(message)

    def _emit(self, node: fx.Node) -> None:
        for n in self.order.before(node):
            if n not in self.names:
                self._emit(n)
        for n in self.order.needs[node]:
            if n in self.under_way and not only_names(node):
                self._wait(n)
        self.names[node] = made = self.made.node_copy(node, self.names.__getitem__)
        if node.op == "placeholder":
            made.name = node.name
        if _worth(node) and node.op == "call_function":
            made.kwargs = {**made.kwargs, "later": True}
            self.under_way[node] = self.work
        elif node.op == "call_function" and not only_moves(node):
            self.work += 1

    def _wait(self, message: fx.Node) -> None:
        begun = self.under_way.pop(message)
        start = self.names[message]
        if begun == self.work and next(iter(reversed(self.made.nodes))) is start:  # nothing to do in between
            start.kwargs = {k: v for k, v in start.kwargs.items() if k != "later"}
            return
        args: Any = message.args
        into, given = self.names[args[0]], self.names[args[1]]
        made = self.made.call_function(again.wait, (start, into, given))
        made.meta.update({k: v for k, v in message.meta.items() if k not in ("tensor", "spec")})
