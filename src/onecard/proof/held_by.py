"""Who has one card's values on the ranks, and what ranks make of them: a value's origin by what it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import torch
from torch import Tensor

from onecard.proof.found import Found
from onecard.proof.nodes import Node

Place = tuple[Node, int]
"""A value of one rank."""


class HeldBy:
    """The places of one card's values, pieces of them included, and what was made of these.

    Args:
        found: values that have a partner are known from the start; who finds pieces tells of them.
    """

    def __init__(self, found: Found) -> None:
        self._nodes: dict[tuple[int, int], Place] = {}
        self._held: defaultdict[int, dict[tuple[int, int], Place]] = defaultdict(dict)
        self._users: defaultdict[tuple[int, int], list[Place]] = defaultdict(list)
        self._brought: defaultdict[int, list[Node]] = defaultdict(list)
        for node in found.nodes:
            for rank, entry in node.entries.items():
                for number, i in entry.inputs[node.position]:
                    source = found.places.get((rank, number, i))
                    if source is not None and source is not node:
                        self._users[id(source), rank].append((node, rank))
            for x in node.inputs if node.message else ():
                self._brought[id(x)].append(node)
        for node in found.nodes:
            for x in node.partners if node.equal or node.times else ():
                self.hold(x, node, (*node.local,))

    def hold(self, one: Node, node: Node, ranks: tuple[int, ...]) -> None:
        """Ranks have a value of one card, or a piece of it; whoever was sent the same, too."""
        for rank in ranks:
            if (id(node), rank) in self._held[id(one)]:
                continue
            self._held[id(one)][id(node), rank] = node, rank
            for other in self._brought[id(node)]:
                same = tuple(r for r, x in other.local.items() if _carries(x, node.local[rank]))
                self.hold(one, other, same)

    def of_all(self, one: Node, names: Container[str]) -> list[Place]:
        """What ranks made by some operators of all that a value is made of, but for what reaches them in a way not seen."""
        found: dict[tuple[int, int], Place] | None = None
        for x in one.inputs:
            if made := self._made_of(x, names):
                found = made if found is None else {key: place for key, place in found.items() if key in made}
        return [*(found or {}).values()]

    def of_any(self, one: Node) -> list[Node]:
        """The same of any of it."""
        return [*dict.fromkeys(node for x in one.inputs for node, _ in self._made_of(x, (called(one),)).values())]

    def _made_of(self, source: Node, names: Container[str]) -> dict[tuple[int, int], Place]:
        places = [place for key in self._held[id(source)] for place in self._users[key]]
        return {(id(node), rank): (node, rank) for node, rank in places if called(node) in names}


def _carries(message: Tensor, x: Tensor) -> bool:
    """Whether a message brings a tensor, alone or in a row with others."""
    flat, mine = message.reshape(-1), x.reshape(-1)
    if message.dtype != x.dtype or not 0 < mine.numel() <= flat.numel():
        return False
    starts = (flat[: flat.numel() - mine.numel() + 1] == mine[0]).nonzero().flatten().tolist()
    return any(torch.equal(flat[start : start + mine.numel()], mine) for start in starts)


def called(node: Node) -> str:
    """An operator's name, the same for one tensor and for each of a list: passes take lists apart."""
    name = node.name.removeprefix("_foreach_")
    return "linalg_vector_norm" if name == "norm" else name


__all__ = ["HeldBy", "called"]
