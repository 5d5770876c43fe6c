"""Gradient merge: which nodes of a step run once for the whole batch, and which for each microbatch.

Once, before the microbatches: what the step writes into the program ahead of the batch, outside of modules (a count, an average
of weights). Once, after them: what needs the gradients. Everything else runs for each microbatch, as it does in a module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from onecard.errors import RecordingError
from onecard.static.passes import row_draws
from onecard.static.passes.kept_once import JOINED, KeptOnce
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.order import reads_none

_PROGRAM = "program"  # memory of the program's own: two tensors of it may share it
_ALONE = ("argument", "constant")
_UPDATES = torch.ops.aten._amp_update_scale_.default


def cut(node: fx.Node) -> bool:
    """Whether an input is an argument of which each microbatch has its own part."""
    return _kind(node) == "argument" and bool(node.meta["input"].facts) and len(node.meta["input"].facts[0]) > 0


def _counts_batches(node: fx.Node) -> bool:
    """Whether a node counts a batch norm's batches, which is told of (``additive.said``)."""
    return any("input" in n.meta and n.meta["input"].name.endswith("num_batches_tracked") for n in node.all_input_nodes)


def _begins(node: fx.Node, given: Collection[fx.Node]) -> bool:
    """Whether a node ends what a step does ahead of its batch."""
    if node.op != "call_function":
        return False
    return bool(node.meta.get("inside")) or effects(node) or any(n in given for n in node.all_input_nodes)


def _kind(node: fx.Node) -> str:
    return node.meta["input"].kind if "input" in node.meta else ""


class Once:
    """Which nodes run once, before all microbatches or after all backward passes, and which others do not depend on them.

    Attributes:
        head: those that run once, before; ``tail``: after. ``same``: those that give the same for each microbatch.
        keys: those of ``head`` that draw the keys of random numbers.
        own: those that depend on the microbatch, or draw.
        kept_once: which writes wait for all backward passes, and of which values the batch's is known then.

    ``training``: whether a step without gradients is refused.

    ``late``: nodes of backward that may as well run once: sums of two gradients that are sums over microbatches themselves.
    """

    def __init__(self, graph: fx.Graph, late: Collection[fx.Node] = (), training: bool = True) -> None:
        self._late = late
        self.memory = GraphMemory(graph, apart=True)
        self.tail: set[fx.Node] = set()
        self.same: set[fx.Node] = set()
        self.own: set[fx.Node] = set()
        self._touched: set[Any] = set()  # memory that the tail reads, and that it writes to
        self._wrote: set[Any] = set()
        self._wrote_behind: set[fx.Node] = set()  # by what needs no gradient, behind all backward passes
        self._read_behind: set[fx.Node] = set()
        self._varied: set[Any] = set()  # memory that a microbatch writes to
        nodes = list(graph.nodes)
        self._out = nodes[-1]
        self._order = {n: i for i, n in enumerate(nodes)}
        stepping = next((i for i, n in enumerate(nodes) if phase_of(n) == "optimizer"), len(nodes))
        backward = [i for i, n in enumerate(nodes[:stepping]) if phase_of(n) == "backward"]
        if not backward and (training or any(phase_of(n) == "optimizer" for n in nodes)):
            raise _no_backward(nodes[stepping:])
        end = backward[-1] if backward else len(nodes)
        calls = [n for n in nodes if n.op == "call_function"]
        self.keys = row_draws.of_batch(calls, {n for n in calls if phase_of(n) == "optimizer"})
        self.kept_once = self._kept_once(nodes, end)
        for i, node in enumerate(nodes):
            if cut(node) or (self.keys and row_draws.has_rows(node)):
                self.own.add(node)
            if node.op == "call_function" and node not in self.keys:
                self._sort(node, i > end)
        self._join_tail(nodes[end + 1 :])
        self._join_made(calls)
        self.head = self._find_head(calls) | self.keys
        self._find_same(nodes)

    def _kept_once(self, nodes: list[fx.Node], end: int) -> KeptOnce:
        given = {n for n in nodes if cut(n) or (self.keys and row_draws.has_rows(n))}
        first = next((i for i, n in enumerate(nodes) if _begins(n, given)), len(nodes))
        may_wait = [
            n
            for n, places in self.memory.writes.items()
            if self._order[n] >= first
            and phase_of(n) == "forward"
            and (_PROGRAM in self._places_of(places) or not n.meta.get("inside"))
            and not (effects(n) or _counts_batches(n))
        ]
        return KeptOnce(nodes, self.memory, end, may_wait, given, self.keys, phase_of)

    def _join_tail(self, late: list[fx.Node]) -> None:
        """What only the tail reads, behind all backward passes, runs once, too: what is made of parameters, or of their dims."""
        for node in reversed(late):
            if node.op != "call_function" or not node.users or not all(user in self.tail for user in node.users):
                continue
            read = set() if reads_none(node) else self._places(node.all_input_nodes)
            if not (
                node in self.keys
                or node in self.own
                or node in self.memory.writes
                or phase_of(node) == "backward"
                or read & self._varied
            ):
                self.tail.add(node)

    def _join_made(self, nodes: list[fx.Node]) -> None:
        """What is made of what the whole batch gives, for the tail alone, runs once, too."""
        for node in reversed(nodes):
            if JOINED in node.meta or not node.users or node in self.tail:
                continue
            if all(n in self.tail and self.kept_once.gives(node, n) for n in node.users):
                self.tail.add(node)

    def has_own(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether a node's value, as another one reads it, has something of the microbatch: also if it was written there."""
        until = self._order[at]
        return node in self.own or any(w in self.own and self._order[w] < until for w in self.memory.writers_to(node))

    def _find_same(self, nodes: list[fx.Node]) -> None:
        """What the tail writes to later on does not count: every microbatch has run by then."""
        once = self.tail | self.head
        written = {root for node, roots in self.memory.writes.items() if node not in once for root in roots}
        varies = {*self.tail, *self.memory.writes} - self.head
        for node in nodes:
            if node.op == "placeholder":
                alike = not cut(node)
            elif node in self.head:
                alike = True
            else:
                still = all(n in self.same and not self.memory.roots[n] & written for n in node.all_input_nodes)
                alike = still and node.op == "call_function" and node not in varies and not effects(node)
                alike &= not any(w in self.own for w in self.memory.writers_to(node))
            if alike:
                self.same.add(node)

    def _find_head(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What the step writes into the program before anything depends on the batch, and what that needs."""
        end = next((i for i, n in enumerate(nodes) if n in self.own or n.meta.get("inside") or effects(n)), 0)
        early, order = nodes[:end], {n: i for i, n in enumerate(nodes)}
        writes = [n for n in early if _PROGRAM in self._places_of(self.memory.writes.get(n, ()))]
        head, wrote = set[fx.Node](), {root for n in writes for root in self.memory.writes[n]}
        wanted = [*writes]
        if writes:  # what reads there before it is written to
            wanted += [n for n in nodes[: order[writes[-1]]] if self._reads(n, wrote)]
        while wanted:
            if (node := wanted.pop()) not in head and node.op == "call_function":
                head.add(node)
                wanted += node.all_input_nodes
        shared = {n for n in nodes if n not in head and self.memory.writes.get(n, frozenset()) & head}
        return set() if shared else head  # each microbatch writes to its own

    def _reads(self, node: fx.Node, places: set[fx.Node]) -> bool:
        return any(self.memory.roots[n] & places for n in node.all_input_nodes)

    def repeated(self) -> list[fx.Node]:
        """What writes into the program once for each microbatch, always the same."""
        return [
            n
            for n in self.memory.writes
            if _PROGRAM in self._places_of(self.memory.writes[n])
            and not (n in self.tail or n in self.head or n in self.own or _counts_batches(n))
            and phase_of(n) == "forward"
        ]

    def kept(self) -> list[fx.Node]:
        """What writes into the program, ahead of the backward pass, of what each microbatch has its own."""
        return [
            n
            for n, places in self.memory.writes.items()
            if n in self.own and n not in self.tail and phase_of(n) == "forward" and _PROGRAM in self._places_of(places)
        ]

    def hooked(self) -> list[fx.Node]:
        """What a hook writes into the program, beside gradients, of a microbatch's backward pass."""
        return [
            n
            for n, places in self.memory.writes.items()
            if n.meta.get("hooked")
            and n not in self.tail
            and phase_of(n) == "backward"
            and any(_kind(r) not in ("", "gradient", *_ALONE) for r in places)
        ]

    def read_ahead(self) -> list[tuple[fx.Node, fx.Node]]:
        """What reads memory of the program that each microbatch adds to behind it: all but the first have others' in it."""
        kept = self.kept()
        roots = {n: {r for r in self.memory.writes[n] if _PROGRAM in self._places_of([r])} for n in kept}
        return [
            (node, n)
            for n in kept
            for node, i in self._order.items()
            if i < self._order[n]
            and node.op == "call_function"
            and not (node in self.tail or node in self.head or node in roots or "batch_norm" in str(node.target))
            and not reads_none(node)
            and any(self.memory.roots[x] & roots[n] for x in node.all_input_nodes)
        ]

    def _sort(self, node: fx.Node, late: bool) -> None:
        if node in self.kept_once.late:
            self._once_behind(node)
            return
        read, written = self._places(node.all_input_nodes), self._places_of(self.memory.writes.get(node, ()))
        reads = not reads_none(node)
        if self._is_tail(node, late, read, written, reads):
            if phase_of(node) == "backward" and node not in self._late:
                raise RecordingError(
                    f"k_steps: backward() at {node.meta['line']} comes after an optimizer's step, whose result it needs. Record "
                    "the two steps apart"
                )
            stale = read & self._varied if reads else set()
            if stale and any(n.op == "placeholder" for n in self.memory.roots if n in stale):
                raise RecordingError(
                    f"k_steps: {words(node)} reads what each backward pass writes into the program's memory"
                )
            self.tail.add(node)
            self._touched |= read | written
            self._wrote |= written
            return
        if effects(node) or any(self.has_own(n, node) for n in node.all_input_nodes):
            self.own.add(node)
        elif (
            late and _PROGRAM in written and not read & self._varied
        ):  # a count, or an average, that is written behind backward()
            self._once_behind(node)
            return
        if phase_of(node) == "backward":
            self._varied |= written

    def made_of_batch(self, node: fx.Node) -> bool:
        """Whether a result is no sum and no mean over rows, and made of such: of those of the whole batch, then.

        Not if a number in it is a microbatch's length.
        """
        return JOINED not in node.meta and self.kept_once.gives(node, self._out) and not self.kept_once.follows(node)

    def _once_behind(self, node: fx.Node) -> None:
        self.tail.add(node)
        self._wrote_behind |= self.memory.writes.get(node, frozenset())
        self._read_behind |= self._roots(node)

    def _is_tail(self, node: fx.Node, late: bool, read: set[Any], written: set[Any], reads: bool) -> bool:
        if node in self._late or phase_of(node) == "optimizer" or any(n in self.tail for n in node.all_input_nodes):
            return True
        if (reads and self._roots(node) & self._wrote_behind) or (
            self.memory.writes.get(node, frozenset()) & (self._wrote_behind | self._read_behind)
        ):
            return True
        if (reads and read & self._wrote) or written & (self._wrote | self._touched):
            return True
        if late and effects(node) and not any(n in self.own for n in node.all_input_nodes):
            return True  # draws for the gradients
        return late and any(phase_of(n) == "backward" and "tensor" in n.meta for n in node.all_input_nodes)

    def _roots(self, node: fx.Node) -> set[fx.Node]:
        return {root for n in node.all_input_nodes for root in self.memory.roots[n]}

    def _places(self, nodes: Iterable[fx.Node]) -> set[Any]:
        return {p for n in nodes for p in self._places_of(self.memory.roots[n])}

    def _places_of(self, roots: Iterable[fx.Node]) -> set[Any]:
        """Memory; the program's as one place, but for what no step writes to: batches, constants."""
        return {
            _PROGRAM if r.op == "placeholder" and "tensor" in r.meta and _kind(r) not in _ALONE else r for r in roots
        }


def is_scale(node: fx.Node) -> bool:
    """Whether an input is a scaler's, by which gradients are multiplied, or its count of steps without an infinity."""
    return node.op == "placeholder" and any(n.target is _UPDATES and node in n.args[:2] for n in node.users)


def _no_backward(stepping: list[fx.Node]) -> RecordingError:
    if any(n.meta.get("inside") for n in stepping):
        return RecordingError(
            "k_steps: an optimizer calls a closure, which calls backward(): write zero_grad(), backward() and step() one after "
            "the other, without a closure"
        )
    return RecordingError("k_steps: the step has no backward(), so that there are no gradients to merge")


def phase_of(node: fx.Node) -> str:
    if node.op != "call_function":
        return ""
    try:
        return node.meta["phase"]
    except KeyError:
        return ""


def words(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.meta['input'].name!r}, an input"
    name = getattr(getattr(node.target, "_schema", None), "name", getattr(node.target, "__name__", str(node.target)))
    return f"{name.removeprefix('aten::')} at {node.meta.get('line', '')}"
