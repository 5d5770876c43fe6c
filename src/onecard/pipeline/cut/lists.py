"""Operators on lists of tensors taken apart by where the elements are: one for each stage's parameters. Pure."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from onecard.pipeline.cut.parts import part_of
from onecard.pipeline.cut.places import NodeRanks, Ranks, is_list_operator
from onecard.static.passes.adding import added
from onecard.static.step.nodes import called, copied_to


def by_place(graph: fx.Graph, places: NodeRanks) -> fx.Graph:
    """The graph with each operator on lists whose elements are on several ranks as several operators."""
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    taken: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node in graph.nodes:
        groups = _groups(node, places)
        if len(groups) > 1 or (node.target is _FINITE and any(r not in (None, places.all) for r in groups)):
            taken[node] = _apart(made, names, node, groups)
        elif node.target is operator.getitem and node.args[0] in taken:
            maker, i = taken[node.args[0]][node.args[1]]
            names[node] = called(made, operator.getitem, (maker, i))
            names[node].meta.update(node.meta)
        else:
            names[node] = copied_to(made, node, names.__getitem__)
    return made if taken else graph


_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
aten = torch.ops.aten


def _each_finite(made: fx.Graph, names: dict[fx.Node, fx.Node], node: fx.Node, groups: dict[Any, list[int]]) -> None:
    """A scaler's check: each rank looks at its gradients, and all learn of what it has found.

    What is found stays one, however many find it: kernels of optimizers skip at one, not at two.
    """
    args: Any = node.args
    grads, found, scale = args
    for ranks, members in groups.items():
        mine = added(made, node, aten.zeros_like.default, names[found])
        one = called(made, _FINITE, ([names[grads[i]] for i in members], mine, names[scale]))
        one.meta.update(node.meta)
        said = added(made, node, aten.clone.default, mine)
        if ranks is not None:
            for n in (mine, one, said):
                n.meta["ranks"] = ranks
        names[node] = added(made, node, aten.clamp_min_.Tensor, names[found], said)


def _groups(node: fx.Node, places: NodeRanks) -> dict[Ranks | None, list[int]]:
    if node.op != "call_function" or not is_list_operator(node) or part_of(node) is not None:
        return {}
    found: dict[Ranks | None, list[int]] = {}
    for i in range(_length(node)):
        found.setdefault(places.of_element(node, i), []).append(i)
    return found


def _length(node: fx.Node) -> int:
    lists = [x for x in node.args if isinstance(x, list | tuple) and x and isinstance(x[0], fx.Node)]
    return len(lists[0]) if lists else 0


def _apart(
    made: fx.Graph, names: dict[fx.Node, fx.Node], node: fx.Node, groups: dict[Any, list[int]]
) -> list[tuple[fx.Node, int]]:
    """One call for each group; for each element which of them has it, and where."""
    length = _length(node)
    found: list[Any] = [None] * length
    if node.target is _FINITE:
        _each_finite(made, names, node, groups)
        return found
    for members in groups.values():

        def part(x: Any, members: list[int] = members) -> Any:
            whole = isinstance(x, list | tuple) and len(x) == length
            return [x[i] for i in members] if whole else x

        args, kwargs = tuple(map(part, node.args)), {k: part(v) for k, v in node.kwargs.items()}
        one = called(made, node.target, *fx.map_arg((args, kwargs), names.__getitem__))  # type: ignore[arg-type]
        one.meta.update(node.meta)
        names[node] = one
        for place, i in enumerate(members):
            found[i] = (one, place)
    return found
