"""Which memory of a recording is alive when: from the node that makes it to the last one that uses any of its names."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.price.convolutions import workspace
from onecard.static.step.memory import shares
from onecard.static.step.step import holders

Block = tuple[fx.Node, int]
"""Memory: the node that makes it, and which of its results it is."""


class Live:
    """The bytes that are alive while a recording runs, its inputs included.

    Attributes:
        after: for each node, bytes that are alive after it; ``during``: while it runs.
        peak: most bytes alive at once; ``peak_at``: the node that runs then, "inputs" if none needs more than those.
        alive_at_peak: what is alive then, largest first.
        inputs: bytes of the inputs, which the program holds all the time.
        order: the nodes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = list(graph.nodes)
        self._at = {node: i for i, node in enumerate(self.order)}
        self._blocks = blocks_in(graph)
        given = {block for n in self.order if n.op == "placeholder" for block in self._blocks[n]}
        self.inputs = sum(map(_bytes, given))
        self._begin: dict[int, set[Block]] = {}
        for i, node in enumerate(self.order):
            self._begin[i] = {block for block in self._blocks[node] if block[0] is node and block not in given}
        self._end = self._ends(given)
        self.after: dict[fx.Node, int] = {}
        self.during: dict[fx.Node, int] = {}
        now = self.peak = self.inputs
        at = -1
        for i, node in enumerate(self.order):
            now += sum(map(_bytes, self._begin[i]))
            self.during[node] = now + workspace(node)
            if self.during[node] > self.peak:
                self.peak, at = self.during[node], i
            now -= sum(map(_bytes, self._end.get(i, ())))
            self.after[node] = now
        self.peak_at = "inputs" if at < 0 else self.order[at].name
        self.alive_at_peak = tuple(self._alive_at(at, given))

    def made_less_freed(self, nodes: Collection[fx.Node]) -> int:
        """Bytes that these nodes make, less those of which they are the last users; what they make stays."""
        made = {block for node in nodes for block in self._begin[self._at[node]]}
        freed = {block for node in nodes for block in self._end.get(self._at[node], ())} - made
        return sum(map(_bytes, made)) - sum(map(_bytes, freed))

    def freed(self, node: fx.Node) -> int:
        """Bytes of which a node is the last user."""
        return sum(map(_bytes, self._end.get(self._at[node], ())))

    def spans(self) -> Iterator[tuple[fx.Node, int, int, int]]:
        """Memory that the graph makes: the node that does, bytes, its place in the order, that of the last node that uses it."""
        ends = {block: i for i, blocks in self._end.items() for block in blocks}
        for begin, blocks in self._begin.items():
            for block in blocks:
                if size := _bytes(block):
                    yield block[0], size, begin, ends.get(block, begin)

    def blocks_of(self, node: fx.Node) -> frozenset[Block]:
        """The memory that a node's result may lie in."""
        return self._blocks[node]

    def _ends(self, given: set[Block]) -> dict[int, list[Block]]:
        """For each place in the order, the memory that nobody uses after it."""
        last: dict[Block, int] = {}
        for i, node in enumerate(self.order):
            for n in (node, *node.all_input_nodes):
                for block in self._blocks[n]:
                    last[block] = i
        found: dict[int, list[Block]] = {}
        for block, i in last.items():
            if block not in given:
                found.setdefault(i, []).append(block)
        return found

    def _alive_at(self, at: int, given: set[Block]) -> Iterator[tuple[str, int]]:
        alive = set(given)
        for i in range(at + 1):
            alive |= self._begin[i]
            if i < at:
                alive -= set(self._end.get(i, ()))
        found = [(_name(b), _bytes(b)) for b in alive if _bytes(b)]
        if at >= 0 and (more := workspace(self.order[at])):
            found.append((f"copies that {self.order[at].name} makes", more))
        yield from sorted(found, key=lambda pair: (-pair[1], pair[0]))


def blocks_in(graph: fx.Graph) -> dict[fx.Node, frozenset[Block]]:
    """The memory that each node's result may lie in; of several results of one operator, each has its own."""
    found: dict[fx.Node, frozenset[Block]] = {}
    given = list(graph.find_nodes(op="placeholder"))
    held = (
        holders([node.meta["input"] for node in given]) if all("input" in n.meta for n in given) else range(len(given))
    )
    for node, i in zip(given, held, strict=True):
        found[node] = frozenset([(given[i], 0)])
    for node in graph.nodes:
        if node in found:
            continue
        shared = shares(node)
        maker: Any = node.args[0] if node.target is operator.getitem else None
        if maker is not None and not shares(maker):
            found[node] = frozenset([(maker, node.args[1])])
        elif shared:
            found[node] = frozenset[Block]().union(*(found[n] for n in shared))
        else:
            found[node] = frozenset((node, i) for i in _results(node))
    return found


def _results(node: fx.Node) -> list[int]:
    """The numbers of a node's results."""
    if node.meta.get("tensor") is not None:
        return [0]
    return [n.args[1] for n in node.users if n.target is operator.getitem]  # type: ignore[misc]


def _bytes(block: Block) -> int:
    maker, i = block
    if maker.meta.get("tensor") is not None:
        return size_of(maker)
    return max((size_of(n) for n in maker.users if n.target is operator.getitem and n.args[1] == i), default=0)


def _name(block: Block) -> str:
    maker, i = block
    known = maker.meta.get("input")
    if known is not None:
        return str(known.name)
    return next((n.name for n in maker.users if n.target is operator.getitem and n.args[1] == i), maker.name)


def size_of(node: fx.Node) -> int:
    """Bytes of the memory that a node's result needs: what is expanded counts once."""
    facts = node.meta.get("tensor")
    if "bytes" in node.meta:  # rows, of which there are as many as there were
        return int(node.meta["bytes"])
    if facts is None:  # several results
        return 0 if is_name(node) else sum(size_of(n) for n in node.users if n.target is operator.getitem)
    shape, stride, dtype, _ = facts
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize


def is_name(node: fx.Node) -> bool:
    """Whether a node only names memory."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and (
        node.target.is_view or (node.meta.get("own") is False and not _writes(node))
    )


def _writes(node: fx.Node) -> bool:
    return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]
