"""The recording of a microbatch of any size, from those of two rows and of four; and over any number of ranks that divide its
experts, from those over two numbers of them. Pure.

Every size is linear in the rows, and linear in how many ranks there are, or in one part of so many. One row would not do: what
lies in memory as it is there needs a copy with two. Nor would one rank, which sends nothing, nor as many as there are experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from onecard._torch.graphs import node_put
from onecard.comm.issue.again import Line
from onecard.place.mesh import ProcessMesh
from onecard.static.step.step import RecordedStep


class NotLinear(Exception):
    """The two recordings differ in more than sizes."""


FROM = (2, 4)
"""The rows of the recordings."""


def of_rows(two: RecordedStep, four: RecordedStep, rows: int) -> RecordedStep | None:
    """The step of ``rows`` rows, to be priced; None if the two recordings are different programs."""
    return _between(two, four, _Rows(rows))


def of_ranks_of_experts(
    few: RecordedStep, many: RecordedStep, numbers: tuple[int, int], ranks: int
) -> RecordedStep | None:
    """The step whose experts are divided over ``ranks`` ranks, to be priced, from those over two numbers of ranks.

    None if they are different programs, or if the tokens of an expert are not a whole number.
    """
    return _between(few, many, _Experts(*numbers, ranks))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What depends on rows."""

    rows: int

    def number(self, one: int, two: int) -> int:
        return _on_line(one, two, self.rows - FROM[0], FROM[1] - FROM[0])

    def other(self, one: Any, two: Any) -> Any:
        raise NotLinear


@dataclass(frozen=True, slots=True)
class _Experts:
    """What depends on how many ranks divide experts: what grows, by their number; what falls, by the part of each."""

    few: int
    many: int
    ranks: int

    def number(self, one: int, two: int) -> int:
        few, many, ranks = self.few, self.many, self.ranks
        if two > one:
            return _on_line(one, two, ranks - few, many - few)
        # The share of 1/ranks on the way from 1/few to 1/many.
        return _on_line(one, two, (few - ranks) * many, (few - many) * ranks)

    def other(self, one: Any, two: Any) -> Any:
        """What has another form: the ranks of a message, and what it says of each of them."""
        if isinstance(one, Line) and isinstance(two, Line):
            return self._line(one, two)
        if not (isinstance(one, list | tuple) and type(one) is type(two) and self._is_by_rank(one, two)):
            raise NotLinear
        return type(one)([self.number(one[0], two[0])] * self.ranks)

    def _is_by_rank(self, one: Sequence[Any], two: Sequence[Any]) -> bool:
        """Numbers that are the same for each rank."""
        counted = (len(one), len(two)) == (self.few, self.many)
        return counted and all(type(n) is int for n in (*one, *two)) and len({*one}) == len({*two}) == 1

    def _line(self, one: Line, two: Line) -> Line:
        meshes = [line.mesh.process_ids for line in (one, two)]
        count = self.number(len(meshes[0]), len(meshes[1]))
        found = range(0, meshes[1][1] * count, meshes[1][1])
        same = all([*ranks] == [*range(0, found.step * len(ranks), found.step)] for ranks in meshes)
        if not same or one.mesh.dim_names != two.mesh.dim_names or one.mesh.ndim != 1:
            raise NotLinear
        return Line(ProcessMesh([*found], one.mesh.dim_names), 0)


def _on_line(one: int, two: int, share: int, of: int) -> int:
    more, left = divmod((two - one) * share, of)
    if left:
        raise NotLinear
    return one + more


def _between(few: RecordedStep, many: RecordedStep, along: _Rows | _Experts) -> RecordedStep | None:
    first, second = list(few.graph.nodes), list(many.graph.nodes)
    if len(first) != len(second) or len(few.inputs) != len(many.inputs):
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    try:
        for a, b in zip(first, second, strict=True):
            if (a.op, a.target) != (b.op, b.target):
                raise NotLinear
            args = _along(a.args, b.args, along, made)
            kwargs = _along(a.kwargs, b.kwargs, along, made) if a.kwargs or b.kwargs else {}
            copy = node_put(graph, a.op, a.target, args, kwargs, a.name, a.type)
            copy.meta = dict(a.meta)
            for key in ("tensor", "touched"):
                if key in a.meta and a.meta[key] != b.meta.get(key):
                    copy.meta[key] = _along(a.meta[key], b.meta.get(key), along, {})
            made[a] = copy
        inputs = tuple(
            replace(a, facts=_along(a.facts, b.facts, along, {})) for a, b in zip(few.inputs, many.inputs, strict=True)
        )
    except NotLinear:
        return None
    return replace(few.with_graph(graph), inputs=inputs)


def _along(one: Any, two: Any, along: _Rows | _Experts, nodes: dict[fx.Node, fx.Node]) -> Any:
    """What lies on the line through two values, in tuples, lists, slices and dicts."""
    kind = type(one)  # a search asks a million times: the frequent kinds come first, without isinstance
    if kind is fx.Node:
        return nodes[one]
    if one is two:
        return one  # numbers, dtypes, and tuples of them: two graphs have no node in common
    if kind is int and type(two) is int:
        return one if one == two else along.number(one, two)
    if kind is tuple and type(two) is tuple and len(one) == len(two):
        return tuple([_along(a, b, along, nodes) for a, b in zip(one, two, strict=True)])
    if kind is Line:
        return one if one == two else along.other(one, two)
    if isinstance(one, tuple | list) and isinstance(two, tuple | list) and len(one) == len(two):
        found = [_along(a, b, along, nodes) for a, b in zip(one, two, strict=True)]
        if hasattr(one, "_fields"):  # a named tuple
            return type(one)(*found)
        return found if isinstance(one, list) else tuple(found)
    if isinstance(one, slice) and isinstance(two, slice):
        parts = [_along(getattr(one, n), getattr(two, n), along, nodes) for n in ("start", "stop", "step")]
        return slice(*parts)
    if isinstance(one, dict) and isinstance(two, dict) and list(one) == list(two):
        return {key: _along(one[key], two[key], along, nodes) for key in one}
    if one is two or one == two or (isinstance(one, float) and isinstance(two, float)):
        return one  # which number it is changes no price
    return along.other(one, two)
