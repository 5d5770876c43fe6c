"""Numbers that each rank counts in its own way: its own rows, its own classes. They have no partner, and miss none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from onecard.proof.found import Found
from onecard.proof.nodes import Node
from onecard.proof.pieces import origin_of
from onecard.proof.whole import scale_of


def number(found: Found, bound: float) -> None:
    """Note which of one card's values ranks count in their own way, or have each element of on one of them.

    Whether an index is right is said by what it picks. So each value that one card makes of such a one has to be held; of a
    result that nobody uses, another one of the same operator. What is made of nothing, and is one number, or integers that
    nobody reads, has its own size.
    """
    alone = {id(node): node for node in found.alone}
    users: defaultdict[int, list[Node]] = defaultdict(list)
    results: defaultdict[int, list[Node]] = defaultdict(list)
    for node in found.one:
        results[node.entries[0].number].append(node)
        for x in node.inputs:
            users[id(x)].append(node)
    here: defaultdict[Hashable, list[Node]] = defaultdict(list)
    for node in found.nodes:
        here[origin_of(node)].append(node)
    for node in reversed([*alone.values()]):
        like = here[origin_of(node)]
        made = [x for x in users[id(node)] or results[node.entries[0].number] if x is not node]
        unread = not users[id(node)] and not node.value.is_floating_point()
        if like and not node.inputs and (unread or all(_same_constant(x, node.value) for x in like)):
            found.numbered[id(node)] = node
        elif not like or not made or any(id(x) in alone for x in made):
            continue
        elif not node.value.is_floating_point():
            found.numbered[id(node)] = node
        elif any(x.partner is node and _each_somewhere(x, node.value, bound) for x in like):
            found.pieced[id(node)] = tuple(like)
        else:
            continue
        del alone[id(node)]


def _same_constant(node: Node, value: Tensor) -> bool:
    """Whether ranks have a value that is one number throughout, in sizes of their own."""
    numbers = torch.cat([value.reshape(-1), *(x.reshape(-1).to(value.dtype) for x in node.local.values())])
    return bool((numbers == numbers[0]).all()) if numbers.numel() else True


def _each_somewhere(node: Node, value: Tensor, bound: float) -> bool:
    """Whether each element of a value is in its place on some rank, as where each rank picks what it has, and masks the rest."""
    if node.whole is not None or any(x.shape != value.shape for x in node.local.values()):
        return False
    near = [(x - value).abs() <= bound * scale_of(value) for x in node.local.values()]
    return len(near) > 1 and bool(torch.stack(near).any(0).all())


__all__ = ["number"]
