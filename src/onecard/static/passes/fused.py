"""Neighbouring pointwise operators as one kernel, for prices: it reads what it is given once, and writes what others read.

So torch.compile's Inductor makes them, and so are the fused kernels of Megatron-LM. The graph that comes out does not run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload
from onecard.static.passes.recompute import recomputed
from onecard.static.price.live import Block, blocks_in, is_name, size_of
from onecard.static.step.nodes import called, copied_to, kernel, traits
from onecard.static.step.writes import written_by

_COPIES = frozenset(["_to_copy", "clone", "cat", "native_dropout", "_conj"])
_SUMS = frozenset(["mean", "sum", "amax", "var"])
OPEN = 16
"""So many kernels may still grow at a time."""
SMALL = 64
"""What has fewer than one of so many elements of a kernel may be read by it besides, such as a weight of a norm."""


def fused(graph: fx.Graph) -> fx.Graph:
    """A graph in which pointwise operators over equally many elements, and sums along rows between them, are one kernel each.

    What forward computes element by element of what is kept anyway, and only such operators of backward need, is computed again.

    Example:
        >>> import onecard as oc, torch
        >>> recording = oc.record(lambda x: (x * 2 + 1).relu())(torch.ones(8))
        >>> [str(node.target) for node in recording.nodes()]
        ['aten.mul.Tensor', 'aten.add.Tensor', 'aten.relu.default']
        >>> [node.meta["touched"] for node in fused(recording.graph).nodes if node.target is kernel]
        [64]
    """
    graph = recomputed(graph, again=_is_made_again)
    return _Rewriter(graph, _groups(graph)).graph


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator works element by element, and writes to nothing that is there."""
    if not isinstance(node.target, OpOverload) or is_name(node) or written_by(node):
        return False
    return traits(node).pointwise or _name(node) in _COPIES


def _is_made_again(node: fx.Node) -> bool:
    """Whether backward computes a forward node again: only pointwise operators need it there."""
    if not is_name(node) and (not is_pointwise(node) or _name(node) == "native_dropout"):
        return False
    return all(_is_fusable(u) for u in _late_users(node))


def _late_users(node: fx.Node) -> Iterator[fx.Node]:
    """The operators of backward that take a node, by any of its names."""
    for user in node.users:
        if is_name(user):
            yield from _late_users(user)
        elif _is_late(user):
            yield user


def _is_late(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def _is_fusable(node: fx.Node) -> bool:
    return is_pointwise(node) or (
        isinstance(node.target, OpOverload) and _name(node) in _SUMS and "tensor" in node.meta
    )


def _name(node: fx.Node) -> str:
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta["tensor"][0]


def _elements(node: fx.Node) -> int:
    """Of the largest tensor of an operator."""
    near = [node, *node.all_input_nodes, *(u for u in node.users if u.target is operator.getitem)]
    return max((prod(_shape(n)) for n in near if "tensor" in n.meta), default=0)


def _ends(node: fx.Node) -> bool:
    """Whether nothing joins a kernel after this operator: sums over what are not neighbours in memory."""
    if _name(node) not in _SUMS:
        return False
    given: Any = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, list | tuple):
        return True
    return [int(d) % len(_shape(given)) for d in dims] != [len(_shape(given)) - 1]


def _where(node: fx.Node) -> tuple[str, str]:
    """The phase, and the block of the model: kernels do not reach over their borders."""
    parts = str(node.meta.get("module", "")).split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    return str(node.meta.get("phase", "")), ".".join(parts[: number + 1])


@dataclass(slots=True, eq=False)
class _Group:
    """Nodes of one kernel, in their order; how many elements it goes over; the memory that it reads and makes."""

    elements: int
    where: tuple[str, str]
    members: list[fx.Node] = field(default_factory=list)
    reads: set[Block] = field(default_factory=set)
    makes: set[Block] = field(default_factory=set)
    closed: bool = False

    def fits(self, node: fx.Node, size: int, reads: set[Block]) -> bool:
        """Whether an operator may run in it: over as much, or over less, of what is made in it alone."""
        if _where(node) != self.where:
            return False
        if self.elements == size or (_name(node) == "cat" and bool(reads & self.makes)):
            return True
        return self.elements % size == 0 and reads <= self.makes and self.elements >= SMALL * size

    def add(self, other: _Group) -> None:
        """Make another kernel a part of this one."""
        self.members += other.members
        self.elements = max(self.elements, other.elements)
        self.reads |= other.reads
        self.makes |= other.makes
        self.reads -= self.makes


def _groups(graph: fx.Graph) -> list[_Group]:
    blocks, place = blocks_in(graph), {node: i for i, node in enumerate(graph.nodes)}
    found: list[_Group] = []
    growing: list[_Group] = []
    for node in graph.nodes:
        if node.op == "placeholder" or is_name(node):
            continue
        reads = {block for n in node.all_input_nodes for block in blocks[n]}
        size = _elements(node) if _is_fusable(node) else 0
        written = {block for n in written_by(node) for block in blocks[n]}
        near = [g for g in growing if g.makes & reads or (size and g.reads & reads)]
        joined = [g for g in near if size and g.fits(node, size, reads)]
        for group in growing:
            group.closed |= bool(written & (group.makes | group.reads))
            group.closed |= group not in joined and bool(group.makes & reads)
        if size:
            mine = _Group(size, _where(node), [node], reads, _results(node, blocks), _ends(node))
            for group in joined:
                mine.add(group)
                group.closed = True
            mine.members.sort(key=place.__getitem__)
            found = [*(g for g in found if g not in joined), mine]
            growing.append(mine)
        growing = [g for g in growing if not g.closed][-OPEN:]
    return [g for g in found if len(g.members) > 1]


def _results(node: fx.Node, blocks: dict[fx.Node, frozenset[Block]]) -> set[Block]:
    """The memory that an operator makes."""
    return {block for block in blocks[node] if block[0] is node}


class _Rewriter:
    """Copies a graph, with one node in place of each group, where the last of its nodes was."""

    def __init__(self, old: fx.Graph, groups: list[_Group]) -> None:
        self.graph = fx.Graph()
        self._blocks = blocks_in(old)
        self._place = {node: i for i, node in enumerate(old.nodes)}
        self._names: dict[fx.Node, fx.Node] = {}
        self._group = {node: group for group in groups for node in group.members}
        self._waiting: dict[_Group, list[fx.Node]] = {}
        users = _users(old, self._blocks)
        for node in old.nodes:
            group = self._group.get(node)
            if group is None:
                self._copy(node)
            elif node is group.members[-1]:
                self._kernel(group, users)

    def _copy(self, node: fx.Node) -> None:
        """Copy a node; a name of what is not made yet waits for it, and is left out if its kernel alone needs it."""
        source = next((n for n in node.all_input_nodes if n not in self._names), None) if is_name(node) else None
        if source is None:
            self._names[node] = copied_to(self.graph, node, self._names.__getitem__)
            return
        maker = next(iter(self._blocks[node]))[0]
        group = self._group[maker]
        self._waiting.setdefault(group, []).append(node)

    def _kernel(self, group: _Group, users: dict[Block, set[fx.Node]]) -> None:
        inside = set(group.members)
        written = [
            b for b in sorted(group.makes, key=lambda b: (self._place[b[0]], b[1])) if not users.get(b, set()) <= inside
        ]
        given: dict[Block, fx.Node] = {}
        for node in group.members:
            for n in node.all_input_nodes:
                for block in self._blocks[n] & group.reads:
                    if block not in given or size_of(given[block]) < size_of(n):
                        given[block] = n
        operands = list(dict.fromkeys(self._names[n] for n in given.values()))
        made = called(self.graph, kernel, operands)
        facts = group.members[-1].meta
        made.meta.update({k: facts[k] for k in ("phase", "module", "line", "rank") if k in facts})
        made.meta["operators"] = [_name(node) for node in group.members]
        made.meta["touched"] = sum(size_of(n) for n in given.values())
        for i, (maker, number) in enumerate(written):
            part = called(self.graph, operator.getitem, (made, i))
            names = [maker] if "tensor" in maker.meta else []
            names += [u for u in maker.users if u.target is operator.getitem and u.args[1] == number]
            for name in names:
                self._names[name] = part
            part.meta.update(names[-1].meta)
            made.meta["touched"] += size_of(part)
        for node in self._waiting.pop(group, ()):
            if all(n in self._names for n in node.all_input_nodes) and node not in self._names:
                self._names[node] = copied_to(self.graph, node, self._names.__getitem__)


def _users(graph: fx.Graph, blocks: dict[fx.Node, frozenset[Block]]) -> dict[Block, set[fx.Node]]:
    """Who reads each memory, by any of its names."""
    found: dict[Block, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "placeholder" and not is_name(node):
            for n in node.all_input_nodes:
                for block in blocks[n]:
                    found.setdefault(block, set()).add(node)
    return found
