"""Gradient merge: a step that was recorded on one microbatch -> the step of ``k`` of them.

Forward and backward run once for each microbatch, and their gradients are added up as ``backward()`` would add them. What needs
the gradients (their messages, clipping, the optimizer) runs once, after the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.rules.call import schema_of
from onecard.static.passes import row_draws
from onecard.static.passes.adding import added
from onecard.static.passes.count_chain import AFTER, AVERAGE, EACH, SUM
from onecard.static.passes.kept_once import JOINED
from onecard.static.passes.once import Once, cut, is_scale, phase_of, words
from onecard.static.passes.whole_counts import is_number, is_whole
from onecard.static.step.nodes import copied_to
from onecard.static.step.order import name_of, only_names

aten = torch.ops.aten


def merged(
    graph: fx.Graph,
    k: int,
    average: bool = True,
    results: Mapping[int, Any] | None = None,
    late: Collection[fx.Node] = (),
    training: bool = True,
    sums: Mapping[int, bool] | None = None,
    once: Once | None = None,
    rows: Mapping[int, int] | None = None,
) -> fx.Graph:
    """The graph of ``k`` microbatches: arguments are ``k`` times as long in their first dim.

    Args:
        average: gradients, and results that are one float each, are divided by ``k``; otherwise they are sums.
        sums: positions of results that are sums (True) or means over rows, whatever gradients are; others of one element are
            averaged. None: those of one element are all sums, or none, as gradients.
        results: the positions of outputs that are given back, with their specs (None of a plain tensor); without it all are.
            Others stay in the program: but for gradients, they may not differ between microbatches.
        rows: positions of results that have a row for each row of the batch, with the degree in which the batch's length is in
            them (``dependence.Kind``).
        late, training: see ``Once``; ``once``: that of the graph, if the caller has it already.

    Each node that is there once for each microbatch has its number in its meta: "microbatch".

    Results that are as long as a microbatch are put one after the other; counts (one integer each) are added up.

    Raises:
        RecordingError: something needs both the gradients of all microbatches and a value of one of them. Names its line.
    """
    return _Merge(graph, k, average, results, once or Once(graph, late, training), sums, rows or {}).made


class _Merge:
    """The graph as it is made."""

    def __init__(
        self,
        graph: fx.Graph,
        k: int,
        average: bool,
        results: Mapping[int, Any] | None,
        once: Once,
        sums: Mapping[int, bool] | None,
        rows: Mapping[int, int],
    ) -> None:
        self.graph, self.k, self.average = graph, k, average
        self.summed, self.degrees = sums, rows
        self.once, self.memory = once, once.memory
        self.made, self.sums = fx.Graph(), dict[fx.Node, fx.Node]()
        self.names: dict[fx.Node, fx.Node] = {}  # of what runs once
        self.each: list[dict[fx.Node, fx.Node]] = [{} for _ in range(k)]
        self.out: Any = next(iter(reversed(graph.nodes))).args[0]
        self.results = dict.fromkeys(range(len(self.out))) if results is None else results
        self.batch = next((n for n in graph.nodes if n.op == "placeholder" and cut(n)), None)
        self.begun = _scaled(graph, self.once) if average else {}
        self.nodes = list(graph.nodes)
        self._inputs()
        wanted = self._gradients()
        for node in self.nodes:
            if node in self.once.head:
                self.names[node] = copied_to(self.made, node, self.names.__getitem__)
        for names in self.each:
            names.update({node: self.names[node] for node in self.once.head})
        for node in self.nodes:
            if is_whole(node):
                self._count(node)
        for number in range(k):
            self._microbatch(number, wanted)
        for node in self.nodes:
            if node in self.once.tail:
                self.names[node] = copied_to(self.made, node, partial(self._in_tail, user=node))
        self.made.output(tuple(self._shown(i, n) for i, n in enumerate(self.out)))

    def _inputs(self) -> None:
        for node in self.nodes:
            if node.op == "placeholder":
                self.names[node] = made = copied_to(self.made, node, self.names.__getitem__)
                if cut(node):
                    (rows, *rest), *others = node.meta["tensor"]
                    made.meta["tensor"] = ((rows * self.k, *rest), *others)
        for i, names in enumerate(self.each):
            for node in self.nodes:
                if node.op == "placeholder" and not cut(node):
                    names[node] = self.names[node]
                elif node.op == "placeholder" and node.users:
                    rows = node.meta["tensor"][0][0]
                    names[node] = added(self.made, node, aten.narrow.default, self.names[node], 0, i * rows, rows)
                    names[node].meta["microbatch"] = i

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def _gradients(self) -> dict[fx.Node, list[fx.Node]]:
        """What backward passes give to the tail and the program; by the last node that makes or writes to each."""
        asked = [n for node in self.nodes if node in self.once.tail for n in node.all_input_nodes]
        asked += [n for n in self.out if isinstance(n, fx.Node)]
        found = dict.fromkeys(base for n in asked if (base := self._base(n)) is not None)
        last: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if node in found:
                last[node] = node
            if node not in self.once.tail and (written := self.memory.writes.get(node)):
                last.update({n: node for n in last if self.memory.roots[n] & written})
        wanted: dict[fx.Node, list[fx.Node]] = {}
        for n, at in last.items():
            wanted.setdefault(at, []).append(n)
        return wanted

    def _base(self, node: fx.Node) -> fx.Node | None:
        """The gradient that a value of a backward pass is, or is a view of; None of another value."""
        if (
            node in self.once.tail
            or node in self.once.same
            or phase_of(node) != "backward"
            or node.meta.get("of rows")
            or node.op != "call_function"
        ):
            return None
        while self._is_view(node):
            node = node.all_input_nodes[0]
        return node

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a node is a view that may as well be taken of the sum."""
        if not isinstance(node.target, OpOverload) or not only_names(node):
            return False
        source = node.all_input_nodes[0]
        return phase_of(source) == "backward" and "tensor" in source.meta

    def _microbatch(self, number: int, wanted: dict[fx.Node, list[fx.Node]]) -> None:
        names = self.each[number]
        for node in self.nodes:
            if node.op == "call_function" and not (node in self.once.tail or node in self.once.head or is_whole(node)):
                names[node] = copied_to(self.made, node, names.__getitem__)
                names[node].meta["microbatch"] = number
                if self.once.keys and row_draws.has_rows(node):
                    row_draws.share_out(names[node], self._ranks(), number, self.k)
                if self.begun.get(node):
                    names[node] = made = added(self.made, node, aten.mul.Tensor, names[node], 1 / self.k)
                    made.meta.update(microbatch=number, part=node.meta.get("part"))
                for gradient in wanted.get(node, ()):
                    self._add(gradient, names[gradient], node)

    def _count(self, node: fx.Node) -> None:
        """A node of what the whole batch counts, ahead of the microbatches."""
        what = node.meta["count"]
        parts = [self._ahead(node, names) for names in self.each[: 1 if what == AFTER else self.k]]
        if what in (SUM, AVERAGE):
            total = parts[0]
            for part in parts[1:]:
                total = self._first(added(self.made, node, aten.add.Tensor, total, part), node)
            if what == AVERAGE:
                total = self._first(added(self.made, node, aten.mul.Tensor, total, 1 / self.k), node)
            parts = [total]
        for names, part in zip(self.each, parts if what == EACH else parts * self.k, strict=True):
            names[node] = part

    def _ahead(self, node: fx.Node, names: dict[fx.Node, fx.Node]) -> fx.Node:
        for given in node.all_input_nodes:
            if given not in names:  # the same for each microbatch
                names[given] = self._ahead(given, names)
        return self._first(copied_to(self.made, node, names.__getitem__), node)

    def _first(self, made: fx.Node, like: fx.Node) -> fx.Node:
        """A node that runs with the first microbatch, in the part of another one."""
        made.meta.update(microbatch=0, part=like.meta.get("part"))
        return made

    def _add(self, gradient: fx.Node, mine: fx.Node, at: fx.Node) -> None:
        """One more microbatch's gradient, which is whole once ``at`` has run."""
        before, number = self.sums.get(gradient), mine.meta["microbatch"]

        def sums(target: Any, *args: Any) -> fx.Node:
            made = added(self.made, gradient, target, *args)
            made.meta.update(microbatch=number, part=at.meta.get("part"))
            return made

        total = mine if before is None else sums(aten.add.Tensor, before, mine)
        if number == self.k - 1 and self.average and gradient not in self.begun:
            total = sums(aten.mul.Tensor, total, 1 / self.k)
        if total is not mine and "spec" in gradient.meta:
            total.meta["spec"] = gradient.meta["spec"]
        self.sums[gradient] = total

    # -- what runs once ----------------------------------------------------------------------------------------------------

    def _in_tail(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """A value that something needs which runs once."""
        if node in self.names and not (node.op == "placeholder" and cut(node)):
            return self.names[node]
        if node in self.once.same:
            return self.each[0][node]
        if self.once.kept_once.gives(node, user) and not self.once.kept_once.follows(node):
            return self._of_batch(node)
        if (base := self._base(node)) is None:
            raise RecordingError(
                f"k_steps: {words(user)} runs once, behind the backward passes of all microbatches, and takes what "
                f"{words(self._own_number(node))} gives: each microbatch has its own of that, and it is no sum and no mean over "
                "rows, nor made of such alone. Return it, and work with it behind the call; or put it into the loss, before "
                f"backward(){self._as_sum(node, user)}"
            )
        if base is node:
            return self.sums[node]
        self.names[node] = made = copied_to(self.made, node, lambda n: self._in_tail(n, user))
        made.meta.pop("part", None)  # a view of the whole step's gradient, not of a microbatch's
        return made

    def _as_sum(self, node: fx.Node, user: fx.Node) -> str:
        """How what is added in place, row by row, is a sum over rows."""
        name = next((n for n in map(name_of, (user, *self.memory.writers_to(node))) if n in _ADDS_ROWS), "")
        made = name.removesuffix("_")
        return (
            f". A sum over rows is what {made} makes of zeros: total.add_(torch.zeros_like(total).{made}(...))"
            * bool(name)
        )

    def _own_number(self, node: fx.Node) -> fx.Node:
        """The number of which each microbatch has its own, and that makes a value one that the batch does not give."""
        once = self.once
        for n in node.all_input_nodes:
            if n.op == "call_function" and is_number(n) and n in once.own and not once.kept_once.gives(n, node):
                return self._own_number(n)
        return node

    def _of_batch(self, node: fx.Node) -> fx.Node:
        """What the batch gives, of a value that each microbatch has its own of: their sum or mean, or made anew of such."""
        if (degree := node.meta.get(JOINED)) is None:
            made = copied_to(self.made, node, lambda n: self._in_tail(n, node))
            made.meta.pop("part", None)
        else:
            made = self._together(node, [names[node] for names in self.each], not degree)
        self.names[node] = made
        return made

    def _shown(self, i: int, node: Any) -> Any:
        """An output: as it is, a sum or a mean, or all parts one after the other."""
        if (
            not isinstance(node, fx.Node)
            or node in self.names
            or node in self.once.same
            or self._base(node) is not None
            or self.once.made_of_batch(node)
        ):
            return self._in_tail(node, node) if isinstance(node, fx.Node) else node
        if is_whole(node):
            return self.each[0][node]
        parts = self._as_left(node)
        if self.k == 1:
            return parts[0]
        facts = node.meta.get("tensor")
        if facts is not None and i in self.results:
            shape, _, dtype, _ = facts
            known = self.summed is not None and i in self.summed
            if (known or not shape) and dtype is not torch.bool:
                mean = self.average if self.summed is None else not self.summed.get(i, False)
                return self._together(node, parts, mean and (dtype.is_floating_point or dtype.is_complex))
            if shape and (ranks := self._interleaved(shape[0], self.results[i])):
                made, degree = self._rows(node, parts, ranks), self.degrees.get(i, 0)
                return added(self.made, node, aten.mul.Tensor, made, float(self.k) ** degree) if degree else made
        raise RecordingError(
            f"k_steps: the step {'returns' if i in self.results else 'leaves in the program'} what {words(node)} gives, and "
            "each microbatch has its own: return what is as long as the batch and cut as it is, a sum or mean over its rows, or "
            "one number"
        )

    def _as_left(self, node: fx.Node) -> list[fx.Node]:
        """Each microbatch's part of a result, by the last operator that has written to it: so it is known who gives it."""
        *_, last = (node, *self.memory.writers_to(node))
        if last is not node and not (last.args and last.args[0] is node and _is_in_place(last)):
            last = node
        for names in self.each:
            names[last].meta.setdefault("tensor", node.meta.get("tensor"))
        return [names[last] for names in self.each]

    def _ranks(self) -> int:
        """Over how many ranks the rows of the batch are cut."""
        if self.batch is None or (given := self.batch.meta["input"].spec) is None:
            return 1
        return int(given.shape[0] // self.batch.meta["tensor"][0][0])

    def _interleaved(self, rows: int, spec: Any) -> int:
        """How many ranks' rows follow each other in a result of a microbatch; 0 of a result that is not as long as it."""
        if self.batch is None:
            return 0
        mine, given = self.batch.meta["tensor"][0][0], self.batch.meta["input"].spec
        if given is None or (spec is not None and spec.layout.dims[0] == given.layout.dims[0]):
            alike = given is None or (spec.layout.mesh is given.layout.mesh and spec.shape[0] == given.shape[0])
            return int(alike and rows == mine)
        whole = spec is None or not spec.layout.dims[0]
        return self._ranks() if whole and rows == given.shape[0] else 0

    def _rows(self, node: fx.Node, parts: list[fx.Node], ranks: int) -> fx.Node:
        """All microbatches' rows in the order of the batch: the ranks one after the other, as each has cut its own."""
        made = added(self.made, node, aten.cat.default, parts)
        if ranks == 1:
            return made
        (rows, *rest), *_ = node.meta["tensor"]
        made = added(self.made, node, aten.view.default, made, [self.k, ranks, rows // ranks, *rest])
        made = added(self.made, node, aten.transpose.int, made, 0, 1)
        made = added(self.made, node, aten.clone.default, made, memory_format=torch.contiguous_format)
        return added(self.made, node, aten.view.default, made, [self.k * rows, *rest])

    def _together(self, node: fx.Node, parts: list[fx.Node], mean: bool) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = added(self.made, node, aten.add.Tensor, total, part)
        return added(self.made, node, aten.mul.Tensor, total, 1 / self.k) if mean else total


_ADDS_ROWS = ("index_add_", "scatter_add_", "index_put_", "addmm_", "addmv_", "addbmm_", "baddbmm_")


def _scaled(graph: fx.Graph, once: Once) -> dict[fx.Node, bool]:
    """Where a scaler's backward passes begin, and (False) what comes of it: what is divided by ``k`` there is so in all of it.

    A loop divides the loss, ``scaler.scale(loss / k)``. Divided at their end only, float16 gradients would be infinite at scales
    ``k`` times smaller, and other steps would be skipped.
    """
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if phase_of(node) != "backward" or node in once.tail:
            continue
        if node.target is aten.mul.Tensor and any(is_scale(n) for n in node.all_input_nodes):
            found[node] = not any(n in found for n in node.all_input_nodes)
        elif any(n in found for n in node.all_input_nodes):
            found[node] = False
    return found


def _is_in_place(node: fx.Node) -> bool:
    """Whether an operator gives its first operand back, changed."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = schema_of(node.target)
    return schema.name != schema.functional and not schema.out
