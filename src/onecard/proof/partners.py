"""Which value of the one-card program a value of the ranks stands for, and whether it is that value.

By the line that made both, where both programs ran it as often; else by what made it: an operator of values that have partners
stands for the same operator of those; else by what it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onecard.proof.alike import Alike
from onecard.proof.explain import explained
from onecard.proof.found import Found, equal
from onecard.proof.holding import Holding, is_part, wrong_ranks
from onecard.proof.nodes import Node, nodes_of
from onecard.proof.numbered import number
from onecard.proof.pieces import complete
from onecard.proof.seen import Watched
from onecard.proof.whole import Whole


def partners(ranks: Sequence[Watched], one: Watched, bound: float) -> Found:
    """Find for each value of the ranks the one card's that it stands for, and compare them."""
    (nodes, places), (alone, _) = nodes_of(ranks, bound), nodes_of([one], bound)
    told = {
        m.ranks for watched in ranks for m in watched.messages if len(m.ranks) > 1 and m.kind not in ("send", "recv")
    }
    found = Found(nodes, alone, places, bound, tuple(sorted({*told, tuple(range(len(ranks)))}, key=len)))
    search = _Search(found, Alike([(node.name, node.order, node.value, node) for node in alone], bound), bound)
    for parts in (("name", "phase", "module", "line"), ("name", "phase", "module"), ("name", "phase")):
        search.pair(parts)
    search.judge()
    complete(found, bound)
    number(found, bound)
    return found


class _Search:
    """One search for partners."""

    def __init__(self, found: Found, values: Alike[Node], bound: float) -> None:
        self.found, self.values, self.bound = found, values, bound
        self.holding = Holding(found.groups, bound)
        self.near = 0
        self.held: set[int] = set()
        self._users: defaultdict[tuple[int, str], list[Node]] = defaultdict(list)
        for node in found.one:
            for source in node.inputs:
                self._users[id(source), node.name].append(node)

    # -- by the line that made them --------------------------------------------------------------------------------------

    def pair(self, parts: Sequence[str]) -> None:
        """Pair those of a kind of which both programs have as many: in order, and what that leaves unlike by value."""
        kinds: tuple[defaultdict[tuple[Any, ...], list[Node]], ...] = defaultdict(list), defaultdict(list)
        taken = {id(node.partner) for node in self.found.nodes if node.partner is not None}
        for table, members in zip(kinds, (self.found.nodes, self.found.one), strict=True):
            for node in members:
                if node.partner is None and id(node) not in taken and not node.message and node.moved is None:
                    shape = tuple(node.value.shape) if node.whole is not None or table is kinds[1] else None
                    table[(*(getattr(node, part) for part in parts), node.position, shape)].append(node)
        by_key: defaultdict[tuple[Any, ...], list[Node]] = defaultdict(list)
        for key, members in kinds[1].items():
            by_key[key[:-1]] += members
        for key, mine in kinds[0].items():
            theirs = kinds[1].get(key, [])
            if key[-1] is None:  # plain parts, whose whole shape nobody knows
                theirs = sorted(by_key.get(key[:-1], ()), key=lambda node: node.order)
            if len(mine) == len(theirs):
                self._pair_all(mine, theirs, "line" in parts)

    def _pair_all(self, mine: Sequence[Node], theirs: Sequence[Node], sure: bool) -> None:
        left: list[Node] = []
        rest: list[Node] = []
        for node, partner in zip(mine, theirs, strict=True):
            node.partner, node.sure = partner, sure
            if not self.holding.fits(node, partner):
                left.append(node)
                rest.append(partner)
        for node in left if len(left) > 1 else ():  # ranks may take microbatches in another order
            other = next((x for x in rest if self.holding.fits(node, x)), None)
            if other is not None:
                node.partner = other
                rest.remove(other)

    # -- all of them -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Compare each node with its partner, and find one for those that have none."""
        taken = {id(node.partner) for node in self.found.nodes if node.partner is not None}
        self.held = {
            id(x) for node in self.found.nodes if node.equal for x in node.partners if self._same_kind(node, x)
        }
        for node in self.found.nodes:
            if node.equal is None:
                self._judge(node, taken)
            if node.equal:
                self.held |= {id(x) for x in node.partners if self._same_kind(node, x)}
            if node.equal and node.partner is not None:
                self.near = node.partner.order

    def _judge(self, node: Node, taken: set[int]) -> None:
        if node.moved is not None:
            self._moved(node, node.moved)
            return
        if node.whole is not None and node.whole.odd:
            self._odd(node, node.whole)
            return
        if node.unlike:
            node.equal, node.wrong, node.off = False, node.unlike, 1.0
            return
        if node.whole is not None and node.whole.value is None:
            return
        stands_for = [x for x in self._by_inputs(node) if not node.sure or id(x) not in taken]
        other = next((x for x in stands_for if self.holding.fits(node, x)), None) or self._by_value(node, taken)
        if other is not None:
            node.partner = other
        elif self._in_groups(node) or self._in_order(node):
            return
        elif node.partner is not None:
            self._differs(node, node.partner)
        elif len(stands_for) == 1 or (stands_for and node.message):
            self._perhaps(node, stands_for)

    def _moved(self, node: Node, before: Node) -> None:
        """Hold what came from other ranks against what it was there, where that was right."""
        if not before.equal or before.partner is None:
            return
        node.partner, node.sure = before.partner, True
        if node.whole is not None and node.whole.odd:
            self._odd(node, node.whole)
        elif not self.holding.fits(node, before.partner):
            self._differs(node, before.partner)

    def _in_groups(self, node: Node) -> bool:
        """Whether groups of ranks, such as stages, stand for values of their own that no other value stands for.

        Each must find one, for the value to be right: a rank whose value is that of a step before, or of nothing, may be a fault.
        """
        if node.whole is not None or len(node.local) < 2:
            return False
        for groups in self._partitions(node):
            chosen: list[Node] = []
            for ranks in groups:
                mine = replace(node, local={rank: node.local[rank] for rank in ranks})
                free = (x for x in self._alike(mine) if id(x) not in self.held and all(x is not y for y in chosen))
                chosen += [x for x in free if self._same_kind(node, x) and self.holding.fits(mine, x)][:1]
            if chosen and len(chosen) == len(groups):
                node.equal, node.how, node.among = True, "whole", ()
                node.partner, node.others = chosen[0], tuple(chosen[1:])
                return True
            node.others = max(node.others, tuple(chosen), key=len)
        return False

    def _in_order(self, node: Node) -> bool:
        """Whether the ranks' parts one behind the other are a value that another operator has made, their rows in any order."""
        parts = [node.local[rank] for rank in sorted(node.local)]
        if node.whole is not None or not parts[0].is_floating_point() or parts[0].dim() != 2 or len(parts) < 2:
            return False
        if len({(x.shape[1], x.dtype) for x in parts}) > 1:
            return False
        joined = torch.cat(parts)
        for other in self.values.with_rows(joined, self.near, node.name):
            if id(other) not in self.held and other.phase == node.phase:
                node.partner, node.equal, node.how, node.among = other, True, "rows", ()
                return True
        return False

    def _same_kind(self, node: Node, other: Node) -> bool:
        return (node.name, node.phase, node.position) == (other.name, other.phase, other.position)

    def _partitions(self, node: Node) -> Iterator[list[tuple[int, ...]]]:
        """Ways to part ranks by the groups that send each other messages, large ones first; by copies; each rank alone."""
        ranks = tuple(node.local)
        for size in sorted({len(group) for group in self.found.groups if 1 < len(group) < len(ranks)}, reverse=True):
            parted: list[tuple[int, ...]] = []
            for group in self.found.groups:
                if len(group) == size and not {r for each in parted for r in each} & {*group} and {*group} <= {*ranks}:
                    parted.append(group)
            if sum(map(len, parted)) == len(ranks):
                yield parted
        kept = self._copies(node)
        if 1 < len(kept) < len(ranks):
            yield kept
        yield [(rank,) for rank in ranks]

    def _copies(self, node: Node) -> list[tuple[int, ...]]:
        """Ranks that have the very same value."""
        found: list[tuple[int, ...]] = []
        for rank, x in node.local.items():
            at = next((i for i, ranks in enumerate(found) if equal(node.local[ranks[0]], x)), None)
            if at is None:
                found.append((rank,))
            else:
                found[at] += (rank,)
        return found

    def _odd(self, node: Node, held: Whole) -> None:
        right = node.partner.value if node.partner is not None else None
        known = () if right is None or held.layout.pending else wrong_ranks(held, right, self.bound)
        node.equal, node.wrong, node.off = False, known or held.odd, 1.0

    def _differs(self, node: Node, partner: Node) -> None:
        node.equal, node.off = False, 1.0
        if node.whole is not None:
            node.wrong = wrong_ranks(node.whole, partner.value, self.bound)
            return
        node.times = self._times(node, partner.value)
        wrong = tuple(r for r, x in node.local.items() if not is_part(x, partner.value, self.bound))
        node.wrong = wrong or tuple(node.local)

    def _times(self, node: Node, value: Tensor) -> int:
        """How often each rank's tensor has its part of a value: as often as there are ranks whose means are averaged."""
        if not all(x.is_floating_point() and x.numel() for x in node.local.values()):
            return 0
        sizes = sorted({len(ranks) for ranks in self.found.groups} - {1})
        fits = (n for n in sizes if all(is_part(x / n, value, self.bound) for x in node.local.values()))
        return next(fits, 0)

    def _perhaps(self, node: Node, stands_for: Sequence[Node]) -> None:
        """A value that is like nothing, of operands that are right: wrong, if a known fault makes it of what it should be."""
        for other in stands_for:
            right = {rank: other.value for rank, x in node.local.items() if x.shape == other.value.shape}
            if not node.message or (right and explained(node.local, right, self.found.groups)):
                node.partner = other
                self._differs(node, other)
                return

    def _by_inputs(self, node: Node) -> Iterator[Node]:
        """One card's values that the same operator made of what this one's operands stand for."""
        sources = [partner for x in node.inputs if x.equal for partner in x.partners]
        if node.message:
            yield from sources
            return
        seen: set[int] = set()
        for source in sources:
            for user in self._users[id(source), node.name]:
                if user.position == node.position and user.phase == node.phase and id(user) not in seen:
                    seen.add(id(user))
                    yield user

    def _by_value(self, node: Node, taken: set[int]) -> Node | None:
        if node.whole is not None:
            other = self.values.like(node.value, self.near, node.name)
            free = other is not None and (node.partner is None or id(other) not in taken)
            return other if other is not None and free and self.holding.fits(node, other) else None
        seen = taken if node.sure else set[int]()  # a value of the same line that another one stands for is an old one
        for other in self._alike(node):
            if id(other) not in seen and self.holding.fits(node, other):
                return other
        return None

    def _alike(self, node: Node) -> Iterator[Node]:
        """One card's values that a rank's tensor is like, or the ranks' together."""
        name = "" if node.message else node.name
        first = next(iter(node.local.values()))
        candidates: Iterable[Tensor] = (first, *(joined for _, _, joined in self.holding.joined(node)))
        for x in candidates:
            yield from self.values.all_like(x, self.near, name)
            if (other := self.values.with_block(x, self.near, name)) is not None:
                yield other


__all__ = ["Found", "Node", "partners"]
