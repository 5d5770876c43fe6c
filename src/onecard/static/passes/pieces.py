"""One large bucket of gradients -> several, so that each can travel when its own part of the backward pass is done.

Eager training fills its buckets when ``backward`` is over, with the gradients in the order in which they became ready, so that
their pieces can be started one after the other (``overlap``). How they are cut depends on sizes alone, so that all ranks of the
line cut alike.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from onecard.comm.issue import again
from onecard.static.passes.adding import added, nbytes
from onecard.static.passes.draft import editing, memory_of, without
from onecard.static.step.memory import GraphMemory

aten = torch.ops.aten
SIZE = 4 * 2**20
"""Bytes of a piece. Twice that is worth cutting."""


@editing
def cut_buckets(graph: fx.Graph, size: int = SIZE) -> bool:
    """``cat``, all-reduce, ``split`` -> the same of each piece. Only where an element's bits do not depend on its place in
    the message (``again.one_by_one``)."""
    messages = graph.find_nodes(op="call_function", target=again.message)
    found = {m: parts for m in messages if (parts := _bucket(m, size)) is not None}
    if not found:
        return False
    memory = memory_of(graph, apart=True)
    for message, (flat, split) in found.items():
        with graph.inserting_before(message):
            taken = _cut(message, flat, split, graph, memory, size)
        without({n: taken[n] for n in sorted(taken)}, [message, flat, split])
    return True


def _bucket(message: fx.Node, size: int) -> tuple[fx.Node, fx.Node] | None:
    """The ``cat`` that fills a bucket, and the ``split`` that empties it, if a message is of that kind."""
    if message.target is not again.message or _of(message, 2) != "all_reduce":
        return None
    flat, sent = _of(message, 0), _of(message, 1)
    if flat is not sent or flat.target is not aten.cat.default or (len(flat.args) > 1 and flat.args[1] != 0):
        return None
    others = [u for u in flat.users if u is not message]
    if len(others) != 1 or others[0].target is not aten.split_with_sizes.default or nbytes(flat) < 2 * size:
        return None
    parts, (split,) = _of(flat, 0), others
    lengths: list[Any] = [p.meta["tensor"][0] for p in parts]
    if [(n,) for n in _of(split, 1)] != [tuple(shape) for shape in lengths]:
        return None
    plain = all(u.target is operator.getitem for u in split.users)
    rest, line = _of(message, 3), _of(message, 4)
    return (flat, split) if plain and again.one_by_one(line, rest[0], flat.meta["tensor"][2]) else None


def _of(node: fx.Node, i: int) -> Any:
    return node.args[i]


def _cut(
    message: fx.Node,
    flat: fx.Node,
    split: fx.Node,
    made: fx.Graph,
    memory: GraphMemory,
    size: int,
) -> dict[fx.Node, fx.Node]:
    """What takes the place of each part that the ``split`` has taken out."""
    parts, names = _of(flat, 0), dict[fx.Node, fx.Node]()
    taken: dict[int, list[fx.Node]] = {}
    for u in split.users:
        taken.setdefault(_of(u, 1), []).append(u)
    for group in _groups([nbytes(p) for p in parts], size):
        members = [parts[i] for i in group]
        alone = len(group) == 1 and _spare(members[0], flat, memory)
        whole = members[0] if alone else added(made, flat, aten.cat.default, members)
        sent = made.call_function(again.message, (whole, whole, *message.args[2:]))
        sent.meta.update(message.meta)
        if len(group) == 1:
            pieces = [whole]
        else:
            cut = added(made, split, aten.split_with_sizes.default, whole, [p.meta["tensor"][0][0] for p in members])
            pieces = [added(made, split, operator.getitem, cut, k) for k in range(len(group))]
        for i, piece in zip(group, pieces, strict=True):
            names.update(dict.fromkeys(taken.get(i, ()), piece))
    return names


def _groups(sizes: list[int], size: int) -> list[list[int]]:
    """Numbers of the parts of each piece.

    Example:
        >>> _groups([5, 1, 1, 3, 9], 4)
        [[0], [1, 2, 3], [4]]
    """
    groups: list[list[int]] = [[]]
    held = 0
    for i, more in enumerate(sizes):
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += more
    return groups


def _spare(part: fx.Node, flat: fx.Node, memory: GraphMemory) -> bool:
    """Whether nobody but the bucket reads a part's memory, so that it can be summed where it lies."""
    roots = memory.roots[part]
    if len(roots) != 1 or next(iter(roots)).op != "call_function" or next(iter(roots)) in memory.written:
        return False
    sharing = {n for n, r in memory.roots.items() if r & roots}
    _, stride, *_ = part.meta["tensor"]
    return stride == (1,) and all(u in sharing or u is flat for n in sharing for u in n.users)
