"""Second names of the same tensor: ``detach``, views to the shape that a tensor has already, ``contiguous`` of what is so."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from onecard.rules.traits import Traits
from onecard.static.passes.draft import editing, without
from onecard.static.step.nodes import traits

aten = torch.ops.aten


@editing
def plain_names(graph: fx.Graph) -> bool:
    """Below autograd a tensor and its ``detach`` differ in nothing, unless an operator turns one of them in place."""
    if any(traits(n).reshapes for n in graph.nodes):
        return False
    out: Any = next(iter(reversed(graph.nodes))).args[0]
    ends, shown = Counter(map(_bottom, out)), _shown(out)
    return without({n: other for n in graph.nodes if n not in shown and (other := _other(n, ends)) is not None})


def _shown(out: Any) -> set[fx.Node]:
    """The names by which what comes out is a view of an input: of a parameter it takes a gradient, unless it was detached."""
    found = set[fx.Node]()
    for node in out:
        way = list[fx.Node]()
        while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node):
            way.append(node)
            node = node.args[0]
        if isinstance(node, fx.Node) and node.op == "placeholder":
            found.update(way)
    return found


def _is_view(node: fx.Node) -> bool:
    known = traits(node)
    return known.views or known.may_view or known.same or node.target is operator.getitem


def _other(node: fx.Node, ends: Counter[Any]) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, known = node.args[0], traits(node)
    if not _may_be_same(known):
        return None
    if any(user.op == "output" for user in node.users) and not (
        ends[_bottom(node)] == 1 and _bottom(node).op == "call_function"
    ):
        return None  # each thing that comes out is a tensor of its own
    if known.same:
        facts: Any = source.meta.get("tensor")
        put_off = node.target in (aten.resolve_conj.default, aten.resolve_neg.default) and facts and facts[2].is_complex
        return None if facts is None or put_off else source
    alike = node.meta.get("tensor") is not None and node.meta["tensor"] == source.meta.get("tensor")
    if known.same_if_alike and alike and _begins_alike(node):
        return source
    return None


def _bottom(node: Any) -> Any:
    """The tensor that a node may be a second name of."""
    while isinstance(node, fx.Node) and _may_be_same(traits(node)) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _may_be_same(known: Traits) -> bool:
    return known.same or known.same_if_alike


def _begins_alike(node: fx.Node) -> bool:
    """Whether a view of the same shape and strides begins where its base does: not a window, nor a turned square."""
    if node.target is aten.as_strided.default:
        return False
    if node.target in (aten.permute.default, aten.transpose.int):
        dims = node.args[1] if node.target is aten.permute.default else None
        return dims is not None and list(dims) == list(range(len(dims)))  # type: ignore[arg-type]
    return True
