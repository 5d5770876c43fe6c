"""The recording of a microbatch of any size, from those of two rows and of four: every size in it is linear in the rows. Pure.

One row would not do: what lies in memory as it is there needs a copy with two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from onecard.static.step.step import Step


class NotLinear(Exception):
    """The two recordings differ in more than sizes."""


FROM = (2, 4)
"""The rows of the recordings."""


def of_rows(two: Step, four: Step, rows: int) -> Step | None:
    """The step of ``rows`` rows, to be priced; None if the two recordings are different programs."""
    first, second = list(two.graph.nodes), list(four.graph.nodes)
    if len(first) != len(second) or len(two.inputs) != len(four.inputs):
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    try:
        for a, b in zip(first, second, strict=True):
            if (a.op, a.target) != (b.op, b.target):
                raise NotLinear
            copy = graph.node_copy(a, lambda node: made[node])
            copy.args = _along(a.args, b.args, rows, made)
            copy.kwargs = _along(a.kwargs, b.kwargs, rows, made)
            copy.meta = {
                key: _along(value, b.meta.get(key), rows, {}) if key in ("tensor", "touched") else value
                for key, value in a.meta.items()
            }
            made[a] = copy
        inputs = tuple(
            replace(a, facts=_along(a.facts, b.facts, rows, {})) for a, b in zip(two.inputs, four.inputs, strict=True)
        )
    except NotLinear:
        return None
    return replace(two.with_graph(graph), inputs=inputs)


def _along(one: Any, two: Any, rows: int, nodes: dict[fx.Node, fx.Node]) -> Any:
    """What lies on the line through two values, in tuples, lists, slices and dicts."""
    if isinstance(one, fx.Node):
        return nodes[one]
    if type(one) is int and type(two) is int:
        if (two - one) % (FROM[1] - FROM[0]):
            raise NotLinear
        return one + (two - one) // (FROM[1] - FROM[0]) * (rows - FROM[0])
    if isinstance(one, tuple | list) and isinstance(two, tuple | list) and len(one) == len(two):
        found = [_along(a, b, rows, nodes) for a, b in zip(one, two, strict=True)]
        if hasattr(one, "_fields"):  # a named tuple
            return type(one)(*found)
        return found if isinstance(one, list) else tuple(found)
    if isinstance(one, slice) and isinstance(two, slice):
        parts = [_along(getattr(one, n), getattr(two, n), rows, nodes) for n in ("start", "stop", "step")]
        return slice(*parts)
    if isinstance(one, dict) and isinstance(two, dict) and list(one) == list(two):
        return {key: _along(one[key], two[key], rows, nodes) for key in one}
    if one is two or one == two or (isinstance(one, float) and isinstance(two, float)):
        return one  # which number it is changes no price
    raise NotLinear
