"""Which value of the one-card program a value of the ranks stands for, and whether it is that value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecard.comm.joined.hub import Told
from onecard.place.layout import Layout
from onecard.proof.alike import Alike, block_in
from onecard.proof.watch import Entry, Value, Watched
from onecard.proof.whole import Whole, apart, scale_of, whole

@dataclass(slots=True)
class Node:
    """One value of the program: of one card, or of all ranks that have it.

    Attributes:
        order: its place in the program; entries: the operator on each rank.
        whole: put together, where ranks say how they hold it; local: each rank's part.
        partner: the one card's; equal: whether it is its value; None: nobody can tell.
        off: how far it is from its partner, relatively.
    """

    order: int
    name: str
    phase: str
    module: str
    line: str
    position: int
    entries: dict[int, Entry]
    local: dict[int, Tensor]
    whole: Whole | None = None
    partner: Node | None = None
    equal: bool | None = None
    off: float = 0.0
    wrong: tuple[int, ...] = ()

    @property
    def value(self) -> Tensor:
        """Of one card's: the whole tensor."""
        found = self.whole.value if self.whole is not None else None
        return next(iter(self.local.values())) if found is None else found

    @property
    def messages(self) -> list[tuple[int, Told]]:
        """That ranks began for it."""
        return [(rank, told) for rank, entry in self.entries.items() for told in entry.messages]


def nodes_of(ranks: Sequence[Watched], bound: float) -> list[Node]:
    """The values of all ranks, those that are parts of one put together, in the order of the program."""
    found: dict[Hashable, Node] = {}
    for rank, watched in enumerate(ranks):
        seen: Counter[Hashable] = Counter()
        for entry in watched.entries:
            for i, value in enumerate(entry.values):
                key = (*_key(entry), i, _kind(value))
                seen[key] += 1
                node = found.get((key, seen[key]))
                if node is None:
                    node = found[key, seen[key]] = Node(
                        entry.number, entry.name, entry.phase, entry.module, entry.line, i, {}, {}
                    )
                node.entries[rank], node.local[rank] = entry, value.local
    made = sorted(found.values(), key=lambda node: node.order)
    for node in made:
        values = {rank: entry.values[node.position] for rank, entry in node.entries.items()}
        if next(iter(values.values())).spec is not None:
            node.whole = whole({rank: v for rank, v in values.items() if v.spec is not None and v.spec.here}, bound)
    return made


def _key(entry: Entry) -> tuple[Hashable, ...]:
    return entry.name, entry.phase, entry.module, entry.line


def _kind(value: Value) -> Hashable:
    spec = value.spec
    return "plain" if spec is None else (spec.layout, spec.shape, spec.dtype)


# -- partners ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """The ranks' nodes with their partners."""

    nodes: list[Node]
    one: list[Node]
    groups: tuple[tuple[int, ...], ...] = field(default=())

    @property
    def divergent(self) -> list[Node]:
        """Those that are not what they stand for, the first one first."""
        return [node for node in self.nodes if node.equal is False]

    @property
    def share(self) -> float:
        """Of the values of the ranks that have a partner."""
        return sum(node.partner is not None for node in self.nodes) / max(len(self.nodes), 1)


def partners(ranks: Sequence[Watched], one: Watched, bound: float) -> Found:
    """Find for each value of the ranks the one card's that it stands for, and compare them.

    By its operator, line, module and order, where both programs have as many of a kind; else by what it is.
    """
    nodes, alone = nodes_of(ranks, bound), nodes_of([one], bound)
    groups = {
        told.ranks for watched in ranks for told in watched.messages if len(told.ranks) > 1 and told.kind != "send"
    }
    found = Found(nodes, alone, tuple(sorted({*groups, tuple(range(len(ranks)))})))
    values = Alike([(node.name, node.order, node.value, node) for node in alone], bound)
    for parts in (("name", "phase", "module", "line"), ("name", "phase", "module"), ("name", "phase")):
        _pair(nodes, alone, parts)
    taken = {id(node.partner) for node in nodes if node.partner is not None}
    near = 0
    for node in nodes:
        _judge(node, values, near, found, taken)
        if node.equal and node.partner is not None:
            near = node.partner.order
    return found


def _pair(nodes: Sequence[Node], alone: Sequence[Node], parts: Sequence[str]) -> None:
    """Pair those of a kind of which both programs have as many."""
    kinds: tuple[defaultdict[tuple[Any, ...], list[Node]], ...] = defaultdict(list), defaultdict(list)
    taken = {id(node.partner) for node in nodes if node.partner is not None}
    for table, members in zip(kinds, (nodes, alone), strict=True):
        for node in members:
            if node.partner is None and id(node) not in taken:
                shape = tuple(node.value.shape) if node.whole is not None or table is kinds[1] else None
                table[(*(getattr(node, part) for part in parts), node.position, shape)].append(node)
    for key, mine in kinds[0].items():
        theirs = kinds[1].get(key, [])
        if key[-1] is None:  # plain parts, whose whole shape nobody knows
            theirs = [x for other, found in kinds[1].items() if other[:-1] == key[:-1] for x in found]
            theirs.sort(key=lambda node: node.order)
        if len(mine) == len(theirs):
            for node, partner in zip(mine, theirs, strict=True):
                node.partner = partner


def _judge(node: Node, values: Alike[Node], near: int, found: Found, taken: set[int]) -> None:
    if node.whole is not None:
        _judge_whole(node, node.whole, values, near, taken)
    else:
        _judge_parts(node, values, near, found)


def _judge_whole(node: Node, held: Whole, values: Alike[Node], near: int, taken: set[int]) -> None:
    bound = values.bound
    if held.odd:
        right = node.partner.value if node.partner is not None else None
        known = () if right is None or held.layout.pending else wrong_ranks(held, right, bound)
        node.equal, node.wrong, node.off = False, known or held.odd, 1.0
        return
    if held.value is None:
        return
    if node.partner is not None:
        node.off = apart(held.value, node.partner.value)
        if node.off <= bound:
            node.equal = True
            return
    other = values.like(held.value, near, node.name)
    if other is not None and (node.partner is None or id(other) not in taken):
        node.partner, node.equal, node.off = other, True, 0.0
        return
    if node.partner is not None:
        node.equal, node.wrong = False, wrong_ranks(held, node.partner.value, bound)


def wrong_ranks(held: Whole, right: Tensor, bound: float) -> tuple[int, ...]:
    """The ranks whose part is not the right one; of a pending value all of them."""
    if held.value is None or held.value.shape != right.shape or held.layout.pending:
        return tuple(held.layout.mesh.process_ids)
    scale = scale_of(right)
    mesh = held.layout.mesh

    def off(rank: int) -> float:
        want = held.layout.local_part(right, mesh.coordinate(rank))
        return apart(held.local[rank], want) * scale_of(held.local[rank], want)

    return tuple(rank for rank in mesh.process_ids if off(rank) > bound * scale)


def _judge_parts(node: Node, values: Alike[Node], near: int, found: Found) -> None:
    """A plain tensor on each rank: the whole value, a part of it, or a summand."""
    wrong, paired = [], node.partner is not None
    for rank, part in node.local.items():
        if node.partner is not None and is_part(part, node.partner.value, values.bound):
            continue
        other = values.like(part, near, node.name) or values.with_block(part, near, node.name)
        if other is None:
            wrong.append(rank)
        elif node.partner is None:
            node.partner = other
    if wrong and (summed := _summed(node, values, near, found)):
        node.partner, wrong = summed, []
    if not wrong:
        node.equal = True
    elif paired:
        node.equal, node.wrong, node.off = False, tuple(wrong), 1.0
    else:  # one rank's may be like another value by chance
        node.partner = None


def is_part(part: Tensor, value: Tensor, bound: float) -> bool:
    """Whether a rank's tensor is the value, or a block of it."""
    if part.shape == value.shape and apart(part, value) <= bound:
        return True
    return part.shape != value.shape and block_in(part, value, bound) is not None


def _summed(node: Node, values: Alike[Node], near: int, found: Found) -> Node | None:
    """The node of which ranks hold summands, or means over their own parts of the batch."""
    for ranks in found.groups:
        if any(rank not in node.local for rank in ranks) or len({node.local[rank].shape for rank in ranks}) != 1:
            continue
        if not node.local[ranks[0]].is_floating_point():
            continue
        total = torch.stack([node.local[rank].double() for rank in ranks]).sum(0)
        for value in (total, total / len(ranks)):
            value = value.to(node.local[ranks[0]].dtype)
            if node.partner is not None and is_part(value, node.partner.value, values.bound):
                return node.partner
            other = values.like(value, near, node.name) or values.with_block(value, near, node.name)
            if other is not None:
                return other
    return None


def layout_of(node: Node) -> Layout | None:
    """How the ranks say that they hold it."""
    return None if node.whole is None else node.whole.layout
