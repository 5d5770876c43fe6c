"""Equal nodes and equal messages: what is computed or sent twice from the same is computed or sent once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onecard.comm import again
from onecard.graph.memory import Memory, effects
from onecard.graph.order import only_names
from onecard.graph.passes._copy import copied

_FRESH = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
)  # equal only before they are written

_LITTLE = 256  # bytes that may be kept from forward to backward


def equal_nodes(graph: fx.Graph) -> fx.Graph:
    """Merge nodes of memory that nobody writes to; messages likewise, with the buffers that they fill."""
    memory = Memory(graph)
    other: dict[fx.Node, fx.Node] = {}
    first: dict[Any, fx.Node] = {}
    fills = _filled_once(graph, memory)
    dropped: set[fx.Node] = set()
    out: Any = next(iter(reversed(graph.nodes))).args[0]
    shown = frozenset[fx.Node]().union(*(memory.roots[n] for n in out if isinstance(n, fx.Node)))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is again.message:
            key = _message_key(node, memory, other, fills)
            if key is None:
                continue
            if key in first:
                other[node.args[0]] = first[key].args[0]  # type: ignore[assignment]
                dropped.add(node)
            else:
                first[key] = node
        elif not effects(node) and node not in memory.writes and _steady(node, memory) and not _fresh(node):
            key = (node.target, _key(node.args, other), _key(node.kwargs, other))
            found = first.setdefault(key, node)
            if (
                found is not node and _is_held(found, node) and not memory.roots[node] & shown
            ):  # each has its own memory
                other[node] = found
    return copied(graph, _resolved(other), lambda n: n not in dropped)


def _is_held(found: fx.Node, node: fx.Node) -> bool:
    """Whether using an earlier result costs no memory: it is from the same phase, names memory, is small, or stays anyway.

    What backward computes anew on purpose, forward would have to keep.
    """
    if found.meta.get("phase") == node.meta.get("phase") or "tensor" not in found.meta or only_names(found):
        return True
    shape, _, dtype, _ = found.meta["tensor"]
    return math.prod(shape) * dtype.itemsize <= _LITTLE or any(user > node for user in found.users)


def _resolved(other: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node | None]:
    return other.get


def _fresh(node: fx.Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "aten::empty").removeprefix("aten::")
    return name in _FRESH or any(isinstance(a, torch.Generator) for a in node.args)


def _steady(node: fx.Node, memory: Memory) -> bool:
    return memory.steady(node) and all(memory.steady(n) for n in node.all_input_nodes)


def _filled_once(graph: fx.Graph, memory: Memory) -> set[fx.Node]:
    """Buffers that one message fills and nobody else writes to."""
    count: dict[fx.Node, int] = {}
    for roots in memory.writes.values():
        for root in roots:
            count[root] = count.get(root, 0) + 1
    return {root for root, n in count.items() if n == 1 and root.op == "call_function"}


def _message_key(node: fx.Node, memory: Memory, other: dict[fx.Node, fx.Node], fills: set[fx.Node]) -> Any:
    """What two equal messages have in common; None of one that is not alone with its buffer."""
    into: Any = node.args[0]
    given: Any = node.args[1]
    if into is given or into not in fills or memory.roots[into] != frozenset([into]) or not memory.steady(given):
        return None
    if any(
        memory.roots[user] & memory.roots[into] and user is not node and user in memory.writes for user in into.users
    ):
        return None
    return ("message", other.get(given, given), _key(node.args[2:], other))


def _key(value: Any, other: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(value, fx.Node):
        return other.get(value, value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_key(v, other) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v, other)) for k, v in value.items()))
    return (type(value), value.hex() if type(value) is float else value)
