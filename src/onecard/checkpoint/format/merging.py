"""One state from what the ranks have of it: what they must have alike is compared, the rest put together. Pure.

Where all ranks have the same state, nothing of this is needed. Where some say themselves what they have (``portions``), each
sends its tree and its boxes, and the first rank decides who holds what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from onecard.checkpoint.format import tree
from onecard.checkpoint.format.index import overlap
from onecard.checkpoint.format.tree import KIND, OF, children, join, kind_of
from onecard.errors import CheckpointError
from onecard.place.boxes import Box, volume, whole

Ranked = Sequence[tuple[int, Any]]  # each with the rank that said it
SPREAD, NAMES = "spread", "spread names"


def merge(words: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state and the holders of each tensor, from the words of all ranks."""
    said: dict[str, list[tuple[int, Any]]] = {}
    for rank, word in enumerate(words):
        for name, each in word["tensors"].items():
            said.setdefault(name, []).append((rank, each))
    node = merged([(rank, word["state"]) for rank, word in enumerate(words)], "")
    return {"state": node, "tensors": {name: _holders(name, each) for name, each in sorted(said.items())}}


def merged(nodes: Ranked, path: str) -> Any:
    """One tree from those of some ranks.

    Example:
        >>> merged([(0, {"$": "spread", "items": [["a", 0, 1]]}), (1, {"$": "spread", "items": [["b", 1, 2]]})], "")
        {'a': 1, 'b': 2}
    """
    first_rank, first = nodes[0]
    kind = first.get(KIND) if isinstance(first, dict) else None
    for rank, node in nodes[1:]:
        if type(node) is not type(first) or (isinstance(node, dict) and node.get(KIND) != kind):
            raise _unlike(path, first_rank, first, rank, node)
    if kind == SPREAD:
        return _spread(nodes, path)
    if kind == NAMES:
        order = {name: at for _, node in nodes for name, at in node["items"]}
        return [name for name, _ in sorted(order.items(), key=lambda item: item[1])]
    if children(first) is None:
        for rank, node in nodes[1:]:
            if node != first:
                raise _unlike(path, first_rank, first, rank, node)
        return first
    return _alike(nodes, path, kind)


def is_spread(node: Any) -> bool:
    """Whether there is something in a tree of which other ranks have more."""
    return tree.is_spread(node) or any(map(is_spread, (children(node) or {}).values()))


def _spread(nodes: Ranked, path: str) -> Any:
    found: dict[str, tuple[int, list[tuple[int, Any]]]] = {}
    for rank, node in nodes:
        for key, order, item in node["items"]:
            found.setdefault(key, (order, []))[1].append((rank, item))
    items = sorted(found.items(), key=lambda item: item[1][0])
    return {key: merged(each, join(path, key)) for key, (_, each) in items}


def _alike(nodes: Ranked, path: str, kind: Any) -> Any:
    """Dicts, lists and tuples, which have the same keys everywhere."""
    parts = [(rank, children(node) or {}) for rank, node in nodes]
    for rank, below in parts[1:]:
        if list(below) != list(parts[0][1]):
            raise _unlike(path, nodes[0][0], list(parts[0][1]), rank, list(below))
    made = {key: merged([(rank, below[key]) for rank, below in parts], join(path, key)) for key in parts[0][1]}
    if isinstance(nodes[0][1], list):
        return list(made.values())
    if kind in ("tuple", "size"):
        return {KIND: kind, "items": list(made.values())}
    if kind is None and (owner := kind_of(nodes[0][1])):
        made[OF] = owner
    return made if kind is None else {KIND: kind, "items": [list(item) for item in made.items()]}


def _unlike(path: str, rank: int, one: Any, other: int, two: Any) -> CheckpointError:
    short = [text if len(text) < 200 else f"{text[:200]}..." for text in (json.dumps(one), json.dumps(two))]
    return CheckpointError(
        f"the ranks do not save the same: {path!r} is {short[0]} on rank {rank}, {short[1]} on rank {other}. A state is "
        "one, as on one card"
    )


def _holders(name: str, said: Ranked) -> dict[str, Any]:
    """Who holds which box of a tensor, from the words of the ranks that have some of it."""
    first_rank, first = said[0]
    held: dict[Box, list[int]] = {}
    values: dict[Box, tuple[int, str]] = {}
    for rank, word in said:
        if [word["dtype"], word["shape"]] != [first["dtype"], first["shape"]]:
            raise _unlike(name, first_rank, [first["dtype"], first["shape"]], rank, [word["dtype"], word["shape"]])
        for text, sample in word.get("boxes", ()):
            box = tuple((a, b) for a, b in text)
            held.setdefault(box, []).append(rank)
            other, before = values.setdefault(box, (rank, sample))
            if before != sample:
                raise CheckpointError(
                    f"the ranks do not save the same: of {name!r} {first['shape']} ranks {other} and {rank} hold copies of "
                    f"{list(map(list, box))}, whose values differ"
                )
    shape = first["shape"]
    own = [word.get("own") for _, word in said]
    if own[0] is not None and len(set(own)) > 1:
        rows = [[[[i, i + 1], *([0, n] for n in shape)], [rank]] for i, (rank, _) in enumerate(said)]
        return {"dtype": first["dtype"], "shape": [len(said), *shape], "held": rows, "alias": None, "rows": True}
    if own[0] is not None or not prod(shape):
        held = {whole(shape): [rank for rank, _ in said]}
    elif sum(map(volume, held)) != prod(shape) or overlap(list(held)):
        raise CheckpointError(
            f"{name!r} {shape}: what the ranks hold of it is not all of it, each element once or in equal boxes: "
            f"{[[list(map(list, box)), ranks] for box, ranks in held.items()][:4]}"
        )
    aliases = {word["alias"] for _, word in said}
    boxes = [[list(map(list, box)), ranks] for box, ranks in sorted(held.items())]
    alias = aliases.pop() if len(aliases) == 1 else None
    return {"dtype": first["dtype"], "shape": shape, "held": boxes, "alias": alias, "rows": False}


def holders(word: Mapping[str, Any]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The boxes of a tensor and their ranks, from what was sent."""
    return tuple((tuple((a, b) for a, b in box), tuple(ranks)) for box, ranks in word["held"])


__all__ = ["NAMES", "SPREAD", "holders", "is_spread", "merge", "merged"]
