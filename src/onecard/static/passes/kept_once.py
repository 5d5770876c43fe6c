"""Gradient merge: what a step keeps of its microbatches (a mean loss, an accuracy, an average) is kept once, of the batch.

A write into the program's memory ahead of the end of the backward passes waits for them, if all that it takes is known of the
whole batch then: sums and means over rows, which microbatches give together, and what is made of these alone. Nothing that a
microbatch runs may read there in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.order import reads_none

JOINED = "joined"
"""In a node's meta: its value is a sum over the rows of a microbatch (1), or a mean (0)."""

FOLLOWS = "follows"
"""In a node's meta: a number that it is given is another one where the batch is longer."""

_Nodes = frozenset[fx.Node]
_NONE: _Nodes = frozenset()


def note_joined(graph: fx.Graph, whole: fx.Graph) -> fx.Node | None:
    """Note at the nodes of a microbatch what was seen at those of its batch, if both do the same up to their gradients.

    Returns:
        A sum or mean over rows that has other dims for a microbatch, so that it is of something else (``x.squeeze().mean(0)`` of
        one row).
    """
    ours, theirs = (
        [n for n in g.nodes if n.op == "call_function" and n.meta.get("phase") == "forward"] for g in (graph, whole)
    )
    if [n.target for n in ours] != [n.target for n in theirs]:
        return None
    noted = [(n, other) for n, other in zip(ours, theirs, strict=True) if other.meta.get(JOINED) in (0, 1)]
    for node, other in noted:
        if node.meta["tensor"][0] != other.meta["tensor"][0]:
            return node
    for node, other in noted:
        node.meta[JOINED] = other.meta[JOINED]
    return None


@dataclass
class _Walk:
    """One look at a graph with some writes that wait.

    Attributes:
        own: what a microbatch has its own of; ``varied``: memory of the program that a microbatch writes such to.
        whole: of ``own``, what is known of the batch; with the memory that is read where it is made of others.
        waits: what runs once, behind, with the writes on which it depends; ``changed``: memory, with those that write to it.
        lost: writes that cannot wait.
    """

    own: set[fx.Node] = field(default_factory=set)
    varied: set[fx.Node] = field(default_factory=set)
    whole: dict[fx.Node, _Nodes] = field(default_factory=dict)
    waits: dict[fx.Node, _Nodes] = field(default_factory=dict)
    changed: dict[fx.Node, _Nodes] = field(default_factory=dict)
    lost: set[fx.Node] = field(default_factory=set)


class KeptOnce:
    """Which writes of a step wait for the end of its backward passes, with what is made of them; and what the batch gives.

    Args:
        nodes: of the graph; ``end``: the number of the last one of the backward passes.
        may_wait: the writes that may; ``own``: what a microbatch has its own of from the start; ``keys``: what it has not.

    Attributes:
        late: what runs once, after the backward passes.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        memory: GraphMemory,
        end: int,
        may_wait: Iterable[fx.Node],
        own: Collection[fx.Node],
        keys: Collection[fx.Node],
        phase_of: Callable[[fx.Node], str],
    ) -> None:
        self.memory, self.end, self._given, self.phase_of = memory, end, own, phase_of
        self._calls = [n for n in nodes if n.op == "call_function" and n not in keys and phase_of(n) != "optimizer"]
        self._order = {n: i for i, n in enumerate(nodes)}
        self._waiting = {*may_wait}
        while lost := (walk := self._walk()).lost:
            self._waiting -= lost
        self._found = walk
        self.late = {*walk.waits}

    def gives(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether the batch's value of what each microbatch has its own of is known, as another node reads it."""
        return self._is_whole(self._found, node, at)

    def follows(self, node: fx.Node) -> bool:
        """Whether a number of which what the batch gives is made goes by the length of a microbatch."""
        if FOLLOWS in node.meta or JOINED in node.meta:
            return JOINED not in node.meta
        return node.op == "call_function" and any(map(self.follows, node.all_input_nodes))

    def _walk(self) -> _Walk:
        seen = _Walk()
        seen.own.update(self._given)
        for node in self._calls:
            self._look(seen, node, self._order[node] > self.end)
        return seen

    def _look(self, seen: _Walk, node: fx.Node, late: bool) -> None:
        roots, writes = self.memory.roots, self.memory.writes.get(node, _NONE)
        read = _NONE if reads_none(node) else frozenset(r for n in node.all_input_nodes for r in roots[n])
        needs = self._needs(seen, node, read | writes)
        sums = node.target is again.message and not any(
            r.op == "placeholder" for r in writes
        )  # over ranks, of what is new
        if needs or node in self._waiting:
            needs |= {node} & self._waiting
            ahead = not late and node not in self._waiting and (writes or effects(node))
            if not ((ahead and not sums) or self.phase_of(node) == "backward") and self._all_known(seen, node, late):
                seen.waits[node] = needs
                seen.changed.update({r: needs | seen.changed.get(r, _NONE) for r in writes})
                return
            seen.lost |= needs
        if node in seen.own or effects(node) or any(n in seen.own for n in node.all_input_nodes) or read & seen.varied:
            seen.own.add(node)
            sums = node.target is again.message and all(r in seen.whole for r in writes)  # over ranks, of what is known
            seen.varied |= _NONE if sums else writes
            shared = {r for r in read & seen.varied if r.op == "placeholder"}  # in it is what others have written
            if JOINED in node.meta and self._is_forward(node) and not shared:
                seen.whole[node] = _NONE
            elif self._is_pure(node) and self._all_known(seen, node, False):
                seen.whole[node] = read.union(*(seen.whole.get(n, ()) for n in node.all_input_nodes))

    def _needs(self, seen: _Walk, node: fx.Node, places: _Nodes) -> _Nodes:
        """The writes that wait, and that a node comes behind."""
        if not seen.waits:
            return _NONE
        found = (*(seen.changed.get(r, ()) for r in places), *(seen.waits.get(n, ()) for n in node.all_input_nodes))
        return _NONE.union(*found)

    def _all_known(self, seen: _Walk, node: fx.Node, late: bool) -> bool:
        """Whether each operand is no microbatch's own, or is known of the batch; ``late``: or is a gradient."""
        return all(
            n not in seen.own
            or self._is_whole(seen, n, node)
            or (late and n.op == "call_function" and self.phase_of(n) == "backward")
            for n in node.all_input_nodes
        ) and not any(self.memory.roots[n] & seen.varied for n in node.all_input_nodes if n not in seen.whole)

    def _is_whole(self, seen: _Walk, node: fx.Node, at: fx.Node) -> bool:
        """Whether nobody writes to what a value is made of before it is taken, at the end of all microbatches."""
        if node not in seen.whole:
            return False
        from_, to = self._order[node], self._order[at]
        own = [w for w in self.memory.writers_to(node) if w.target is not again.message or self._order[w] > to]
        between = (w for r in seen.whole[node] for w in self.memory.writers_to(r) if from_ < self._order[w] < to)
        return not own and not any(between)

    def _is_forward(self, node: fx.Node) -> bool:
        return self.phase_of(node) == "forward" and "tensor" in node.meta

    def _is_pure(self, node: fx.Node) -> bool:
        """Whether a node may run once more, at another time."""
        if not self._is_forward(node) or not isinstance(node.target, OpOverload) or node in self.memory.writes:
            return False
        return not effects(node) and not any("count" in n.meta for n in node.all_input_nodes)
