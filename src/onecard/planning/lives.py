"""When the tensors of a piece are made and dropped, so that copies of the piece can be put one behind the other. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from onecard.static.price.convolutions import workspace
from onecard.static.price.live import Live


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that a node of a piece makes.

    Attributes:
        nbytes: how much; forward: whether forward makes it; at: by which node of the piece's forward or backward.
        until: the last node that uses it: (how many pieces further on, whether in forward, which node there); None: it lasts
            until the step ends.
        gradient: whether it is the gradient of a parameter, which the step leaves.
    """

    nbytes: int
    forward: bool
    at: int
    until: tuple[int, bool, int] | None
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class PieceLives:
    """Of one piece: what it makes, and how many nodes its forward and backward have."""

    lives: tuple[Life, ...]
    forward: int
    backward: int


NO_LIVES = PieceLives((), 0, 0)


class _Places:
    """Where nodes run: in which piece, in its forward or backward, as which of its nodes there."""

    def __init__(self, nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], forward: Collection[fx.Node]) -> None:
        self.count: Counter[tuple[int, bool]] = Counter()
        self.of: dict[fx.Node, tuple[int, bool, int]] = {}
        for node in nodes:
            which = (at[node], node in forward)
            self.of[node] = (*which, self.count[which])
            self.count[which] += 1

    def life(self, maker: fx.Node, nbytes: int, last: fx.Node, gradient: bool = False) -> Life:
        piece, forward, place = self.of[maker]
        until = None
        if last in self.of:
            other, *rest = self.of[last]
            until = (other - piece, *rest)
        return Life(nbytes, forward, place, until, gradient)  # type: ignore[arg-type]


def lives_of(
    live: Live, nodes: Sequence[fx.Node], at: Mapping[fx.Node, int], forward: Collection[fx.Node],
    gradients: Collection[fx.Node], pieces: int,
) -> list[PieceLives]:  # fmt: skip
    """Of each piece of a recording.

    Args:
        nodes: in their order; at: the piece of each; forward: those that run before backward; gradients: those that make the
            gradients that the step leaves; pieces: how many.
    """
    places = _Places(nodes, at, forward)
    found: list[list[Life]] = [[] for _ in range(pieces)]
    for maker, nbytes, _, last in live.spans():
        end = live.order[last]
        if maker in places.of:
            gradient = maker in gradients and maker not in forward and end.op == "output"
            found[at[maker]].append(places.life(maker, nbytes, end, gradient))
    for node in nodes:
        if nbytes := workspace(node):
            found[at[node]].append(places.life(node, nbytes, node))
    return [
        PieceLives(tuple(sorted(lives, key=_in_order)), places.count[i, True], places.count[i, False])
        for i, lives in enumerate(found)
    ]


def _in_order(life: Life) -> tuple[Any, ...]:
    """As nodes run; what one node makes, in an order that is the same in each recording."""
    return not life.forward, life.at, life.nbytes, life.until is None, life.until
