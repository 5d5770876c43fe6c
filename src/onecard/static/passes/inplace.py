"""In place at the last use: an operator that works element by element writes where its operand was, if nobody wants that.

The same kernel on the same numbers; one block of memory less to get, to touch for the first time, and to give back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.passes.draft import editing, exchanged, memory_of
from onecard.static.passes.fixed import contiguous
from onecard.static.step.memory import GraphMemory
from onecard.static.step.nodes import traits
from onecard.static.step.order import name_of

aten = torch.ops.aten


@editing
def in_place(graph: fx.Graph) -> bool:
    """``y = relu(x)`` -> ``y = relu_(x)`` where ``x`` is not read again."""
    forms = {n: form for n in graph.nodes if (form := _written_form(n)) is not None}
    if not forms:
        return False
    memory = memory_of(graph, apart=True)
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for n, roots in memory.roots.items():
        for r in roots:
            sharing.setdefault(r, []).append(n)
    found: dict[fx.Node, fx.Node] = {}  # by the memory that they write to
    for node in forms:
        root = _spent(node, memory)
        if root is not None and root not in found and _is_last_use(node, sharing[root]):
            found[root] = node
    for node in found.values():
        made = exchanged(node, forms[node], node.args, node.kwargs)
        made.meta["own"] = False
    return bool(found)


def _is_last_use(node: fx.Node, sharing: list[fx.Node]) -> bool:
    """Whether nobody after a node uses a block of memory, by any of its names."""
    return not any(user > node for n in sharing for user in (n, *n.users))


def _written_form(node: fx.Node) -> Any:
    """The operator that does the same in place; None if there is none."""
    return _form_of(node.target) if traits(node).pointwise else None


@cache
def _form_of(target: OpOverload) -> Any:
    if target._schema.is_mutable:
        return None
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    name = target._schema.overload_name or "default"
    if packet is None or name not in packet.overloads():
        return None
    found = getattr(packet, name)
    alike = [a.name for a in found._schema.arguments] == [a.name for a in target._schema.arguments]
    return found if alike else None


def _spent(node: fx.Node, memory: GraphMemory) -> fx.Node | None:
    """The memory of the first operand, if it is one block that an operator made and the result fits into exactly."""
    args: Any = node.args
    first = args[0] if args else None
    if not isinstance(first, fx.Node) or first.meta.get("tensor") != node.meta.get("tensor"):
        return None
    roots = memory.roots[first]
    root = next(iter(roots))
    shape, stride, *_ = first.meta["tensor"]
    if len(roots) != 1 or not contiguous(shape, stride) or not _fresh(root):
        return None
    others = [n for n in node.all_input_nodes if n is not first]
    return None if any(memory.roots[n] & roots for n in others) else root


def _fresh(root: fx.Node) -> bool:
    maker: Any = root.args[0] if root.args and root.op == "call_function" and name_of(root) == "" else root
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, OpOverload):
        return False
    return traits(maker).fresh
