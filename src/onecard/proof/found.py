"""The ranks' values with those of one card that they are: how many of them were found, and which were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onecard.proof.alike import blocks_in
from onecard.proof.nodes import Node, Places
from onecard.proof.whole import apart

_COPIES = ("copy", "clone", "_to_copy", "_unsafe_view", "_reshape_copy", "view_copy")
"""What only copies numbers, or gives them another shape."""


@dataclass(slots=True)
class Found:
    """The ranks' nodes with their partners.

    Attributes:
        nodes: of the ranks; one: of one card; places: the node of each rank's entry.
        bound: how far equal values may be apart.
        groups: ranks that send each other messages.
        pieced: one card's values that only several of the ranks' are together, each with these.
        numbered: one card's values that ranks count in their own way, so that nobody can compare them.
    """

    nodes: list[Node]
    one: list[Node]
    places: Places
    bound: float
    groups: tuple[tuple[int, ...], ...] = field(default=())
    pieced: dict[int, tuple[Node, ...]] = field(default_factory=dict)
    numbered: dict[int, Node] = field(default_factory=dict)

    @property
    def divergent(self) -> list[Node]:
        """Those that are not what they stand for, the first one first."""
        return [node for node in self.nodes if node.equal is False]

    @property
    def compared(self) -> int:
        """How many of one card's values were compared with the ranks': a pair that nobody can compare does not count."""
        return len(self.one) - len(self.alone) - len(self.numbered)

    @property
    def alone(self) -> list[Node]:
        """One card's values that no value of the ranks is equal to, as it is or as many times as ranks average."""
        held = {
            id(x)
            for node in self.nodes
            if node.equal or node.times
            for x in node.partners
            if _all_of_it(node, x, self.bound)
        }
        held |= {*self.pieced, *self.numbered}
        copies = [node for node in self.one if node.name in _COPIES]
        for node, held_first in [*((node, True) for node in copies), *((node, False) for node in copies[::-1])]:
            for x in node.inputs:  # one that only copies what is held, or of which what is held is a copy
                first, second = (x, node) if held_first else (node, x)
                if id(first) in held and id(second) not in held and _same_numbers(x.value, node.value):
                    held.add(id(second))
        return [node for node in self.one if id(node) not in held]

    def names_alone(self) -> tuple[str, ...]:
        """The same in words, each kind once."""
        return _in_words(self.alone)

    def names_numbered(self) -> tuple[str, ...]:
        """Those that ranks count in their own way, in words."""
        return _in_words([*self.numbered.values()])

    @property
    def share(self) -> float:
        """Of one card's values those that were compared with the ranks'."""
        return self.compared / max(len(self.one) - len(self.numbered), 1)


def _all_of_it(node: Node, one: Node, bound: float) -> bool:
    """Whether ranks that have parts of a value have all of them, and not those of a microbatch alone."""
    if node.whole is not None or (node.how != "part" and not node.times):
        return True
    left = torch.ones(one.value.shape, dtype=torch.bool, device="cpu")
    for x in node.local.values():
        part, value, free = x / node.times if node.times else x, one.value, left
        if part.dim() != value.dim():  # a dim of size one more or less
            part, value, free = part.squeeze(), value.squeeze(), left.squeeze()
        for block in blocks_in(part, value, bound):
            free[block] = False
    return not left.any() or not left.squeeze().dim()


def _in_words(nodes: Sequence[Node]) -> tuple[str, ...]:
    kinds = Counter((node.name, node.phase, node.module, node.line) for node in nodes)
    return tuple(f"{n} x {name} in {phase} {module!r} at {line}" for (name, phase, module, line), n in kinds.items())


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and apart(a, b) == 0.0


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and apart(a.reshape(-1), b.reshape(-1)) == 0.0
