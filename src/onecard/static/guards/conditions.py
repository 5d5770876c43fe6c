"""The conditions of a recording as a small graph of their own: asked before a replay, of the values that it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import draws_by


def asked(
    graph: fx.Graph, conditions: Sequence[Any], lines: Mapping[Any, str] = MappingProxyType({})
) -> tuple[fx.Graph | None, tuple[bool, ...]]:
    """A graph of the same inputs that gives the answers, with those that a replay needs; None if nothing is asked.

    It writes to nothing: counters that the step counts up are counted up in copies.
    """
    if not conditions:
        return None, ()
    memory = GraphMemory(graph)
    needed = _needed(graph, [a for _, args, _ in conditions for a in args if isinstance(a, fx.Node)], memory)
    drawn = next((n for n in graph.nodes if n in needed and _draws(n)), None)
    if drawn is not None:
        raise RecordingError(
            "a value that the step reads on the host (in an if, an int()) depends on random numbers, drawn at "
            f"{drawn.meta.get('line') or 'an unknown line'}, which cannot be drawn before a replay to ask for it. Return the "
            "tensor and read it outside of the step; a layer that is dropped at random: with torch.where, or a rate of 0"
        )
    written = {root for node in needed for root in memory.writes.get(node, ())}
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = made.node_copy(node)
    for node in graph.nodes:
        if node.op == "placeholder" and node in written:
            names[node] = made.call_function(torch.ops.aten.clone.default, (names[node],))
            names[node].meta = dict(node.meta)
        elif node in needed and node.op == "call_function":
            names[node] = made.node_copy(node, names.__getitem__)
    answers = [made.call_function(f, fx.map_arg(args, names.__getitem__)) for f, args, _ in conditions]
    for node, condition in zip(answers, conditions, strict=True):
        node.meta["line"] = lines.get(condition, "")
    made.output(tuple(answers))
    return made, tuple(outcome for _, _, outcome in conditions)


def answered_otherwise(conditions: fx.Graph, names: Sequence[str], before: Sequence[Any], now: Sequence[Any]) -> str:
    """Which answer is another one, in words: of what, and where it was asked.

    Args:
        names: of the inputs; before, now: the answers.
    """
    output = next(iter(conditions.find_nodes(op="output")))
    node = next(node for node, a, b in zip(output.args[0], before, now, strict=True) if a != b)
    given = dict(zip(conditions.find_nodes(op="placeholder"), names, strict=True))
    waiting, found = [node], dict[fx.Node, None]()
    while waiting:
        one = waiting.pop()
        found[one] = None
        waiting += [n for n in one.all_input_nodes if n not in found]
    of = ", ".join(name for n, name in given.items() if n in found)
    line = node.meta.get("line") or ""
    return (
        f"{of or 'a number'}, which the step asks about"
        + (f" at {line}" if line else "")
        + " (in an if, an int(), or an operator "
        "whose number autograd keeps)"
    )


def _draws(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return draws_by(target, node.args, node.kwargs)
    return getattr(target, "__name__", "") == "_drawn"


def _needed(graph: fx.Graph, wanted: Sequence[fx.Node], memory: GraphMemory) -> set[fx.Node]:
    """The nodes that these depend on, through memory as well, whichever view of it was written to."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: set[fx.Node] = set()
    left = [(node, order[node]) for node in wanted]
    while left:
        node, until = left.pop()
        if node not in found:
            found.add(node)
            left += [(n, order[node]) for n in node.all_input_nodes]
        left += [(w, order[w]) for w in memory.writers_to(node) if order[w] < until and w not in found]
    return found
