"""Calls on rows whose message travels beside something else: each is two nodes, its first half and the call.

What comes home from the experts is awaited behind the shared expert, and gradients that go to the experts leave ahead of the
shared expert's backward pass. The sizes of such messages are data, so it is whole calls that are split, not messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from torch import fx

from onecard.static.step.nodes import called
from onecard.static.step.order import Order, only_moves, sends
from onecard.static.step.row_calls import RUN, START, call_on_rows, only_moves_rows

AHEAD = 32
"""Nodes that compute, behind a call, among which is looked for what does not need it."""


def split(graph: fx.Graph, least: int) -> dict[fx.Node, fx.Node]:
    """Put a first half ahead of each call that may be made in two: each first half and its call.

    ``least``: bytes of rows for each rank, on a CPU. What a rank itself sends is data; all ranks decide alike.
    """
    halves = {}
    for node in graph.find_nodes(op="call_function", target=RUN):
        if only_moves_rows(node) and (call_on_rows(node).each >= least or _device(node) != "cpu"):
            with graph.inserting_before(node):
                first = called(graph, START, node.args)
            first.meta.update({k: v for k, v in node.meta.items() if k not in ("tensor", "spec")})
            node.args = (*node.args, first)
            halves[first] = node
    return halves


def _device(node: fx.Node) -> str:
    """Where a call's ordinary tensors lie; those of rows are not in a graph."""
    seen, waiting = {node}, [node]
    while waiting:
        for n in waiting.pop(0).all_input_nodes:
            if (facts := n.meta.get("tensor")) is not None:
                return str(facts[3].type)
            if n not in seen:
                seen.add(n)
                waiting.append(n)
    return "cpu"


def join(halves: Mapping[fx.Node, fx.Node]) -> None:
    """Make calls at once again."""
    for first, node in halves.items():
        node.args = node.args[:-1]
        first.graph.erase_node(first)


class Beside:
    """What may run while a call is under way: nodes behind it that do not need it.

    Attributes:
        work: of each first half those that compute, among the next ``AHEAD``; needing: what needs the call, up to there.
    """

    def __init__(self, order: Order, halves: Mapping[fx.Node, fx.Node]) -> None:
        self.work: dict[fx.Node, list[fx.Node]] = {}
        self.needing: dict[fx.Node, set[fx.Node]] = {}
        for first, call in halves.items():
            self.needing[first], self.work[first] = _apart(order, call)

    def holds(self, node: fx.Node, under_way: Iterable[fx.Node], made: Mapping[fx.Node, None]) -> bool:
        """Whether a node had better wait: it needs a call that is under way, and there is something that does not."""
        if sends(node):
            return False
        return any(
            node in self.needing.get(first, ()) and any(n not in made for n in self.work[first]) for first in under_way
        )


def _apart(order: Order, call: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
    """What needs a call, and what computes and does not, among the nodes behind it."""
    needing, free = {call}, list[fx.Node]()
    behind = (n for n in _after(call) if n.op == "call_function")
    for node in islice(behind, 4 * AHEAD):
        if any(n in needing for n in order.before(node)):
            needing.add(node)
        elif not only_moves(node):
            free.append(node)
        if len(free) + len(needing) > AHEAD:
            break
    return needing - {call}, free


def _after(node: fx.Node) -> Iterable[fx.Node]:
    now = node.next
    while now.op != "root":
        yield now
        now = now.next
