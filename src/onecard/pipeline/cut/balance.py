"""Cuts so that all stages take equally long by the price, and little crosses between them. Pure."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import accumulate

from torch import fx

from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.machine.cost import Machine
from onecard.static.passes.adding import nbytes
from onecard.static.passes.once import phase_of
from onecard.static.price.price import operator_seconds, work
from onecard.static.step.memory import GraphMemory
from onecard.static.step.order import only_names

MOST = 400
"""Places that are tried as cuts; of more, those where least crosses."""


def balanced(
    graph: fx.Graph, nodes: Sequence[fx.Node], stages: int, machine: Machine, whole: bool = False
) -> list[fx.Node]:
    """The first node of each stage but the first: the slowest stage, with what it takes and sends, is as fast as can be.

    Args:
        nodes: of the forward pass, in order; each is charged with its backward, too.
        whole: all nodes of one operator on distributed tensors stay together.

    Source: the partitioning of PipeDream (Narayanan et al., 2019), by dynamic programming.
    """
    if stages < 2:
        return []
    seconds = [0.0, *accumulate(seconds_of(graph, nodes, machine))]
    memory = GraphMemory(graph, apart=True)
    crossing = [2 * bytes_ / machine.bandwidth for bytes_ in crossing_bytes(nodes, memory)]
    closed = in_chains(graph, nodes, memory)
    if whole:
        closed |= {i for i in range(1, len(nodes)) if nodes[i].meta["operator"] == nodes[i - 1].meta["operator"]}
    places = [i for i in range(1, len(nodes)) if i not in closed]
    found = _candidates([crossing[0], *(crossing[i] for i in places)], len(places) + 1, stages)
    cuts = [0, *(places[i - 1] for i in found), len(nodes)]
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [(float("inf"), 0.0, 0)] * (len(cuts) - 1)]
    for _ in range(stages):
        row = [(float("inf"), 0.0, 0)] * len(cuts)
        for j in range(1, len(cuts)):
            right = crossing[cuts[j]] if cuts[j] < len(nodes) else 0.0
            for i in range(j):
                before, sent, _from = best[-1][i]
                left = crossing[cuts[i]] if i else 0.0
                slowest = max(before, seconds[cuts[j]] - seconds[cuts[i]] + left + right)
                row[j] = min(row[j], (slowest, sent + right, i))
        best.append(row)
    found, j = [], len(cuts) - 1
    for row in reversed(best[1:]):
        j = row[j][2]
        found.append(cuts[j])
    starts = found[:-1][::-1]
    if len(set(starts)) != stages - 1 or 0 in starts:
        raise RecordingError(
            f"stages: the forward pass cannot be cut into {stages}: name the cuts, oc.Stages(..., at=[...])"
        )
    return [nodes[i] for i in starts]


def seconds_of(graph: fx.Graph, nodes: Sequence[fx.Node], machine: Machine) -> list[float]:
    """For each node of the forward pass its seconds, and those of the backward that belongs to it."""
    at: dict[int, int] = {}
    found = [0.0] * len(nodes)
    for i, node in enumerate(nodes):
        found[i] += _seconds(node, machine)
        if (number := node.meta.get("call")) is not None:
            at.setdefault(number, i)
    last = len(nodes) - 1
    for node in graph.nodes:
        if phase_of(node) == "backward":
            number = node.meta.get("call")
            found[last if number is None else at.get(number, last)] += _seconds(node, machine)
    return found


def _seconds(node: fx.Node, machine: Machine) -> float:
    if not isinstance(node.target, OpOverload) or only_names(node):
        return 0.0
    return operator_seconds(node, machine, work(node))


def crossing_bytes(nodes: Sequence[fx.Node], memory: GraphMemory) -> list[int]:
    """For each node of the forward pass the bytes that earlier ones have made and it or later ones use."""
    order = {n: i for i, n in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        if "tensor" not in node.meta or (_is_cheap(node) and (node.all_input_nodes or memory.steady(node))):
            continue
        last = max((order[u] for u in node.users if u in order), default=i)
        if last > i:
            changes[i + 1] += nbytes(node)
            changes[last + 1] -= nbytes(node)
    return [*accumulate(changes)][: len(nodes)]


def _is_cheap(node: fx.Node) -> bool:
    """A view of a parameter, or what is made of nothing: it does not cross, unless somebody fills it."""
    return all(n.op == "placeholder" for n in node.all_input_nodes) and (only_names(node) or not node.all_input_nodes)


def in_chains(graph: fx.Graph, nodes: Sequence[fx.Node], memory: GraphMemory | None = None) -> set[int]:
    """Places between what makes or first changes memory and the last that changes it in forward, or takes one of its results.

    A result that ranks sum is changed behind backward, by the last stage.
    """
    memory, order = memory or GraphMemory(graph, apart=True), {n: i for i, n in enumerate(nodes)}
    first: dict[fx.Node, int] = {}
    found, calls = set[int](), calls_of(graph)
    for i, node in enumerate(nodes):
        if node.target is operator.getitem or (i and is_one_call(nodes[i - 1], node, calls)):
            found.add(i)
        for root in memory.writes.get(node, ()):
            begin = first.setdefault(root, order.get(root, i))
            found.update(range(begin + 1, i + 1))
    for node in graph.nodes:
        if node not in order and phase_of(node) == "forward":
            for root in memory.writes.get(node, ()):
                found.update(range(order.get(root, len(nodes)) + 1, len(nodes)))
    return found


def calls_of(graph: fx.Graph) -> set[int]:
    """Autograd's numbers of the calls that have a backward."""
    return {n.meta["call"] for n in graph.nodes if phase_of(n) == "backward" and n.meta.get("call") is not None}


def is_one_call(one: fx.Node, other: fx.Node, calls: Collection[int]) -> bool:
    """Whether two nodes of forward are of one of these calls."""
    number = other.meta.get("call")
    entries = {n.meta["entry"] for n in (one, other) if "entry" in n.meta}
    return number in calls and one.meta.get("call") == number and len(entries) < 2


def _candidates(crossing: Sequence[float], count: int, stages: int) -> list[int]:
    """Places where no less crosses next to them."""
    found = [
        i
        for i in range(1, count)
        if crossing[i] <= crossing[i - 1] and (i + 1 >= count or crossing[i] <= crossing[i + 1])
    ]
    if len(found) < stages:
        found = [*range(1, count)]
    if len(found) > MOST:
        found = sorted(sorted(found, key=lambda i: (crossing[i], i))[:MOST])
    return found
