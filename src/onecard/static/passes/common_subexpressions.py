"""Equal nodes and equal messages: what is computed or sent twice from the same is computed or sent once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.static.passes.draft import editing, memory_of, without
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.nodes import traits
from onecard.static.step.order import only_names

aten = torch.ops.aten
_LITTLE = 256  # bytes that may be kept from forward to backward


@editing
def equal_nodes(graph: fx.Graph) -> bool:
    """Merge nodes of memory that nobody writes to; messages likewise, with the buffers that they fill.

    How large a part is, whether it is copied before it is sent, and whether zeros stand for what other ranks compute, differs
    from rank to rank: it may not decide which messages are sent.
    """
    memory = memory_of(graph)
    other: dict[fx.Node, fx.Node] = {}
    alike: dict[fx.Node, fx.Node] = {}  # for what is sent: that which is the same on all ranks
    first: dict[Any, fx.Node] = {}
    computed: dict[Any, fx.Node] = {}
    given: dict[Any, fx.Node] = {}
    names: dict[str, str] = {}  # of nodes that are alike, the first one's
    fills = _filled_once(graph, memory)
    dropped: set[fx.Node] = set()
    out: Any = next(iter(reversed(graph.nodes))).args[0]
    shown = frozenset[fx.Node]().union(*(memory.roots[n] for n in out if isinstance(n, fx.Node)))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is again.message:
            key = _message_key(node, memory, alike, fills)
            if key is None:
                continue
            if key in first and memory.roots[node.args[0]] & shown:
                continue  # what is shown has its own memory
            if key in first:
                other[node.args[0]] = alike[node.args[0]] = first[key].args[0]  # type: ignore[assignment]
                dropped.add(node)
            else:
                first[key] = node
        elif not effects(node) and node not in memory.writes and _steady(node, memory) and not _fresh(node):
            free = not memory.roots[node] & shown
            if (found := _first(node, computed, other)) is not node and free and _is_held(found, node, _LITTLE):
                other[node] = found
            found = _first(node, given, alike, _stands_for(node, names))
            if found is not node and (_is_held(found, node, -1) or _only_copies(node)):
                alike[node], names[node.name] = found, found.name
    return without({n: other[n] for n in sorted(other)}, dropped)


def _first(node: fx.Node, seen: dict[Any, fx.Node], same: dict[fx.Node, fx.Node], more: Any = None) -> fx.Node:
    return seen.setdefault((node.target, _key(node.args, same), _key(node.kwargs, same), more), node)


def _stands_for(node: fx.Node, names: dict[str, str]) -> Any:
    """Of a constant the distributed operator that it is part of: on a rank that has none of its elements it is its result.

    Two means are two on all ranks, though on some both are zeros. What only fills up a part is none of these.
    """
    if node.all_input_nodes or all(u.target is aten.cat.default and u.args[0][0] is not node for u in node.users):  # type: ignore[index]
        return None
    return _named(node.meta.get("of"), names)


def _named(x: Any, names: dict[str, str]) -> Any:
    """An operator's arguments, where equal nodes have one name."""
    if isinstance(x, str):
        return names.get(x, x)
    if isinstance(x, tuple):
        return tuple(_named(part, names) for part in x)
    return x if type(x).__hash__ is not None else repr(x)


def _is_held(found: fx.Node, node: fx.Node, little: int) -> bool:
    """Whether using an earlier result costs no memory: it is from the same phase, names memory, is small, or stays anyway.

    What backward computes anew on purpose, forward would have to keep.
    """
    if found.meta.get("phase") == node.meta.get("phase") or "tensor" not in found.meta or only_names(found):
        return True
    shape, _, dtype, _ = found.meta["tensor"]
    return math.prod(shape) * dtype.itemsize <= little or any(user > node for user in found.users)


def _fresh(node: fx.Node) -> bool:
    """Whether a node has no equal: memory with nothing in it is equal only before it is written."""
    is_operator = isinstance(node.target, OpOverload)
    return not is_operator or traits(node).room or any(isinstance(a, torch.Generator) for a in node.args)


def _steady(node: fx.Node, memory: GraphMemory) -> bool:
    return memory.steady(node) and all(memory.steady(n) for n in node.all_input_nodes)


def _filled_once(graph: fx.Graph, memory: GraphMemory) -> set[fx.Node]:
    """Buffers that one message fills and nobody else writes to."""
    count: dict[fx.Node, int] = {}
    for roots in memory.writes.values():
        for root in roots:
            count[root] = count.get(root, 0) + 1
    return {root for root, n in count.items() if n == 1 and root.op == "call_function"}


def _message_key(node: fx.Node, memory: GraphMemory, other: dict[fx.Node, fx.Node], fills: set[fx.Node]) -> Any:
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


def _only_copies(node: fx.Node) -> bool:
    """Whether a node copies, or fills up with zeros: what some ranks do to their parts before they send, and others need not."""
    if node.target is aten.cat.default:
        return any(map(_only_zeros, node.args[0]))  # type: ignore[arg-type]
    return node.target is aten.clone.default or _only_zeros(node)


def _only_zeros(node: fx.Node) -> bool:
    return node.target is aten.new_zeros.default or (node.target is aten.full.default and bool(node.args[1] == 0))


def _key(value: Any, other: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(value, fx.Node):
        return other.get(value, value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_key(v, other) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v, other)) for k, v in value.items()))
    return (type(value), value.hex() if type(value) is float else value)
