"""Recompute: what costs next to nothing is not kept from forward to backward but computed again, from what is there anyway.

The policy: operators that work element by element, and norms, whose operands are inputs, are kept for backward in any case, or
can be computed again themselves. The same operators on the same numbers, once more: bits stay.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.price.live import size_of
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.nodes import copied_to, traits
from onecard.static.step.order import only_names
from onecard.static.step.writes import written_by


def recomputed(graph: fx.Graph, most: int | None = None, again: Callable[[fx.Node], bool] | None = None) -> fx.Graph:
    """Backward takes copies of cheap forward nodes, made where it needs the first of their results.

    Args:
        most: only so many of them, those with the largest results. Whatever is left out is kept, so any choice is right.
        again: which forward nodes may be computed again; those that cost next to nothing if left out.
    """
    chosen = dict.fromkeys(_again(graph, again or _cheap))
    if most is not None:
        chosen = dict.fromkeys(
            sorted(chosen, key=lambda n: -size_of(n))[:most]
        )  # of equal size the first ones, on every rank
    if not chosen:
        return graph
    made, names, copies = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def late(n: fx.Node) -> fx.Node:
        if n not in chosen:
            return names[n]
        if n not in copies:
            for operand in n.all_input_nodes:
                late(operand)
            copies[n] = copied_to(made, n, late)
            copies[n].meta["phase"] = "backward"
        return copies[n]

    for node in graph.nodes:
        names[node] = copied_to(made, node, late if _is_late(node) else names.__getitem__)
    return made


def _is_late(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def candidates(graph: fx.Graph) -> int:
    """How many nodes could be computed again."""
    return len(_again(graph, _cheap))


def _again(graph: fx.Graph, may: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes to compute again, in their order."""
    memory = GraphMemory(graph, apart=True)
    there: set[fx.Node] = set()  # can be had in backward
    cheap: set[fx.Node] = set()
    for node in graph.nodes:
        still = memory.steady(node)
        operands = [n for n in node.all_input_nodes if n not in there]
        if node.op == "placeholder":
            if still or "tensor" not in node.meta:
                there.add(node)
        elif node.op != "call_function" or _is_late(node) or not still:
            continue
        elif may(node) and not operands:
            cheap.add(node)
            there.add(node)
        elif any(map(_is_late, node.users)):
            there.add(node)
    wanted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in cheap and any(_is_late(u) or u in wanted for u in node.users):
            wanted.add(node)
    return [node for node in graph.nodes if node in wanted]


def _cheap(node: fx.Node) -> bool:
    if only_names(node):
        return True
    if not isinstance(node.target, OpOverload) or effects(node) or written_by(node):
        return False
    return traits(node).cheap
