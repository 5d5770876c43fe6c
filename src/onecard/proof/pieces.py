"""One card's values that no value of the ranks is, but several together are: microbatches, rows by routes, uneven parts.

A piece has the origin of the value: its operator and line, or what it is made of. Each counts for one value, and together they
leave nothing of it out: as blocks beside each other, as its rows in any order, as summands. A mean over a rank's own rows has
larger gradients than one over all rows: as many times as there are pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecard.proof.alike import Block, blocks_in, squeezed
from onecard.proof.found import Found, equal
from onecard.proof.held_by import HeldBy, called
from onecard.proof.holding import NORMS, SUMMANDS
from onecard.proof.nodes import Node
from onecard.proof.rows import LastRows
from onecard.proof.whole import apart

ADDED = ("add", "addmm", "baddbmm")
"""What adds a product to what came before."""
SHARE = 0.0
"""As many times as a piece's numbers go into the value's: a mean over its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A tensor that ranks have, once for all ranks with the very same."""

    value: Tensor
    node: Node
    ranks: tuple[int, ...]


def complete(found: Found, bound: float) -> None:
    """Find those of one card's values that only several values of the ranks are."""
    search = _Pieces(found, bound)
    for _ in range(2):  # what the first found says how many microbatches there are, and what others are made of
        for node in found.alone:
            held = search.holds(node)
            if held is not None:
                found.pieced[id(node)] = held


class _Pieces:
    """One search."""

    def __init__(self, found: Found, bound: float) -> None:
        self.found, self.bound = found, bound
        self.factors = [1.0, SHARE, *sorted({float(len(ranks)) for ranks in found.groups} - {1.0})]
        self.used: set[int] = set()
        self._pieces: dict[int, list[Piece]] = {}
        self._nodes: defaultdict[Hashable, list[Node]] = defaultdict(list)
        self._ones: defaultdict[Hashable, list[Node]] = defaultdict(list)
        self.makers = HeldBy(found)
        for node in found.one:
            for key in _origins(node):
                self._ones[key].append(node)
        for node in found.nodes:
            for key in _origins(node):
                self._nodes[key].append(node)

    def holds(self, one: Node) -> tuple[Node, ...] | None:
        """The values of the ranks that together are a value of one card; None: none are."""
        if not one.value.numel():
            return (*self._nodes[origin_of(one)][:1],) or None
        tried = set[int]()
        for key, nodes in self._of_one_origin(one):
            left = [node for node in nodes if id(node) not in tried]
            tried |= {id(node) for node in left}
            held = self._covered(one, left) if left else None
            if held is None and key is not None:
                held = self._summed(one, key)
            if held is not None:
                return held
        return self._summed_by_makers(one)

    def _of_one_origin(self, one: Node) -> Iterator[tuple[Hashable | None, list[Node]]]:
        """Values of the ranks that may be pieces: by the line that made them, by what they are made of, those nearest first."""
        here, *others = _origins(one)
        yield here, sorted(self._nodes[here], key=lambda node: room_of(node) != room_of(one))
        yield None, self.makers.of_any(one)
        for key in others:
            yield key, self._nodes[key]

    # -- parts that lie beside each other ----------------------------------------------------------------------------------

    def _covered(self, one: Node, nodes: Iterable[Node]) -> tuple[Node, ...] | None:
        """Pieces that are blocks or rows of a value and fill it."""
        value = one.value
        free = [x for node in nodes for x in self._pieces_of(node) if id(x) not in self.used]
        free = [x for x in free if x.value.numel() and x.value.is_floating_point() == value.is_floating_point()]
        if sum(x.value.numel() for x in free) < value.numel():
            return None
        for place in (self._in_blocks, self._in_rows):
            for factor in self.factors if value.is_floating_point() else [1.0]:
                taken = place(value, free, factor)
                if taken is not None:
                    self._take(value, taken)
                    for piece in taken:
                        self.makers.hold(one, piece.node, piece.ranks)
                    return tuple(dict.fromkeys(piece.node for piece in taken))
        return None

    def _pieces_of(self, node: Node) -> list[Piece]:
        """What ranks have of a node, each once; of what is a value of one card already, further ranks' own numbers alone."""
        if id(node) not in self._pieces:
            made, ranks = list[Tensor](), list[tuple[int, ...]]()
            for rank, x in _all_of(node):
                at = next((i for i, y in enumerate(made) if equal(x, y)), None)
                if at is None:
                    made.append(x)
                    ranks.append(rank)
                else:
                    ranks[at] += rank
            if node.equal and node.partner is not None and node.how not in ("part", *SUMMANDS):
                if made[:1] and made[0].unique().numel() != 1:
                    made, ranks = [], []
                made, ranks = made[:1] * len(node.local), ranks[:1] * len(node.local) if made else []
            self._pieces[id(node)] = [Piece(x, node, each) for x, each in zip(made, ranks, strict=True)]
        return self._pieces[id(node)]

    def _take(self, value: Tensor, taken: Sequence[Piece]) -> None:
        """Pieces count once; how many they are says how many times a mean over their rows is one over all rows."""
        self.used |= {id(piece) for piece in taken}
        if len(taken) > 1 and value.dim() and len({x.value.shape for x in taken}) == 1:
            made = {float(len(taken)), value.numel() / taken[0].value.numel()}
            self.factors += sorted(made - {*self.factors})

    def _in_blocks(self, value: Tensor, pieces: Iterable[Piece], factor: float) -> list[Piece] | None:
        left, taken = torch.ones(value.shape, dtype=torch.bool, device="cpu"), list[Piece]()
        for piece in pieces:
            place = self._place(_divided(piece.value, value, factor), value, left)
            if place is not None:
                left[place] = False
                taken.append(piece)
                if not left.any():
                    return taken
        return None

    def _place(self, part: Tensor, value: Tensor, left: Tensor) -> Block | None:
        if not value.dim() and not part.dim():
            return () if bool(left) and apart(part, value) <= self.bound else None
        return next((block for block in blocks_in(part, value, self.bound) if bool(left[block].all())), None)

    def _in_rows(self, value: Tensor, pieces: Iterable[Piece], factor: float) -> list[Piece] | None:
        if not value.is_floating_point() or not value.dim():
            return None  # of integers many rows are alike
        rows, taken = LastRows(value, self.bound), list[Piece]()
        for piece in pieces:
            if rows.take(_divided(piece.value, value, factor)):
                taken.append(piece)
                if rows.all_taken:
                    return taken
        return None

    # -- parts that add up -------------------------------------------------------------------------------------------------

    def _summed(self, one: Node, key: Hashable) -> tuple[Node, ...] | None:
        """The values that came instead of one, of microbatches and ranks, which add up to it, or whose mean it is."""
        shape = squeezed(one.value)
        ones = [x for x in self._ones[key] if squeezed(x.value) == shape]
        nodes = [x for x in self._nodes[key] if all(squeezed(y) == shape for y in x.local.values())]
        nodes = [x for x in nodes if x.whole is None or x.whole.value is None or squeezed(x.value) == shape]
        if not nodes or len(nodes) % len(ones):
            return None
        count, place = len(nodes) // len(ones), next(i for i, x in enumerate(ones) if x is one)
        for steps in range(1, len(ones) + 1):
            if len(ones) % steps:
                continue
            each = len(ones) // steps  # in one step
            step, at = divmod(place, each)
            begin = step * count * each
            mine = nodes[begin + at : begin + count * each : each]
            if self._adds_up(one, mine):
                return tuple(mine)
        return None

    def _summed_by_makers(self, one: Node) -> tuple[Node, ...] | None:
        """What was made of all pieces of what one was made of, and adds up to it; or the last of it, which has the rest."""
        for names in ((called(one),), ADDED):
            places = [
                (node, rank) for node, rank in self.makers.of_all(one, names)
                if node.whole is None and squeezed(node.local[rank]) == squeezed(one.value)
            ]  # fmt: skip
            once = [
                (node, rank) for node, rank in places
                if not any(other is node and r < rank and equal(node.local[r], node.local[rank]) for other, r in places)
            ]  # fmt: skip
            for some in (places, once) if names is not ADDED else ([place] for place in once):
                if some and self._add_up_to(one, [node.local[rank] for node, rank in some]):
                    for node, rank in some:
                        self.makers.hold(one, node, (rank,))
                    return tuple(dict.fromkeys(node for node, _ in some))
        return None

    def _adds_up(self, one: Node, nodes: Sequence[Node]) -> bool:
        return any(self._add_up_to(one, parts, len(nodes)) for parts in self._ways(nodes))

    def _add_up_to(self, one: Node, parts: Sequence[Tensor], count: int = 0) -> bool:
        value, factors = one.value, {factor or 1.0 for factor in self.factors}
        factors |= {factor * (count or len(parts)) for factor in factors}
        stacked = torch.stack([x.reshape(value.shape) for x in parts])
        if not value.is_floating_point():
            return value.dtype != torch.bool and torch.equal(stacked.sum(0), value)
        if one.name in NORMS and apart(stacked.norm(dim=0), value) <= self.bound:
            return True
        return any(apart(stacked.sum(0) / factor, value) <= self.bound for factor in factors)

    def _ways(self, nodes: Sequence[Node]) -> Iterator[list[Tensor]]:
        """What some nodes are together: what their layouts say, their copies, what all or some of their ranks have."""
        if all(node.whole is not None and node.whole.value is not None for node in nodes):
            yield [node.value for node in nodes]
            return
        if all(all(equal(node.value, x) for x in node.local.values()) for node in nodes):
            yield [node.value for node in nodes]
        for ranks in self.found.groups:
            if all({*ranks} <= {*node.local} for node in nodes):
                yield [node.local[r] for node in nodes for r in ranks]
        if any(len(node.local) < len(self.found.groups[-1]) for node in nodes):  # other ranks have none of it
            yield [x for node in nodes for x in node.local.values()]


def _divided(part: Tensor, value: Tensor, factor: float) -> Tensor:
    return part if factor == 1.0 else part / (factor or value.numel() / part.numel())


def _all_of(node: Node) -> list[tuple[tuple[int, ...], Tensor]]:
    if node.whole is not None and node.whole.value is not None:
        return [] if node.whole.odd else [((*node.local,), node.whole.value)]
    return [((rank,), x) for rank, x in node.local.items()] if node.whole is None else []


def _origins(node: Node) -> list[Hashable]:
    """What says that two values are one operator's: its line; the library's own line; in forward the user's line alone."""
    found: list[Hashable] = [origin_of(node)]
    inside = next(iter(node.entries.values())).inside
    if inside:
        found.append((called(node), inside))
    if (
        node.phase == "forward" and node.value.is_floating_point()
    ):  # in backward many operators have the line of backward()
        found.append((node.line, room_of(node), node.position))
    return found


def origin_of(node: Node) -> Hashable:
    """The operator and the user's line that runs it."""
    return called(node), node.phase, node.line


def room_of(node: Node) -> tuple[str, ...]:
    """A module without its numbers, which a rank that has some of many counts from its own first one; nor what wraps a model."""
    return tuple(word for word in node.module.split(".") if word and not word.isdigit() and word != "module")


__all__ = ["Piece", "complete", "origin_of"]
