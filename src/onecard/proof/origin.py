"""Where a wrong result begins: the first wrong value on the way to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onecard.proof.nodes import Node
from onecard.proof.partners import Found


def origin(found: Found, ends: Sequence[tuple[int, int, int]]) -> Node | None:
    """The first value that is not what it stands for, of those that lead to a wrong result.

    A value that is like nothing on one card, such as a partial result of an algorithm that only the ranks use, is no fault where
    what is made of it is right. Where nothing that leads there is known to be wrong, it is the first that nobody knows.

    Args:
        found: the ranks' values with their partners.
        ends: what has made the wrong results: rank, entry, and which of its values.
    """
    last = [found.places[end] for end in ends if end in found.places]
    ways = _backwards(last)
    known = [node for node in ways if node.equal is False] or found.divergent
    return _first(known or ways)


def _backwards(last: Iterable[Node]) -> list[Node]:
    """All values from which others come without one between that is right."""
    seen: dict[int, Node] = {}
    waiting = [node for node in last if node.equal is not True]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            waiting += [x for x in node.inputs if x.equal is not True]
    return [*seen.values()]


def _first(nodes: Sequence[Node]) -> Node | None:
    """The one that comes from no other, the earliest of these."""
    among = {id(node) for node in nodes}
    alone = [node for node in nodes if not any(id(x) in among for x in _backwards(node.inputs) if x is not node)]
    return min(alone or nodes, key=lambda node: node.order, default=None)
