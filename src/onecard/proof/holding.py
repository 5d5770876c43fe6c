"""In which ways ranks hold a value of one card: all of it, in parts, or as summands of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onecard.proof.alike import block_in
from onecard.proof.nodes import Node
from onecard.proof.whole import Whole, apart, scale_of

_JOINED = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "norm": lambda x: x.norm(dim=0),
}


class Holding:
    """Compares values of the ranks with one card's.

    Args:
        groups: ranks that send each other messages; bound: how far equal values may be apart.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]], bound: float) -> None:
        self.groups, self.bound = groups, bound

    def fits(self, node: Node, partner: Node) -> bool:
        """Whether a node is the value of another one; if so, it is noted in which way."""
        if node.unlike:
            return False
        if node.whole is not None:
            held = node.whole
            like = None if held.value is None or held.odd else _in_shape_of(held.value, partner.value)
            if like is None:
                return False
            node.off = apart(*like)
            node.equal = True if node.off <= self.bound else None
            return node.equal is True
        how = self._way(node, partner.value)
        if how is not None:
            node.equal, (node.how, node.among) = True, how
        return how is not None

    def _way(self, node: Node, value: Tensor) -> tuple[str, tuple[int, ...]] | None:
        """In which way plain tensors of the ranks are a value."""
        same = all(x.numel() == value.numel() for x in node.local.values())
        if same and all(apart(x, value.reshape(x.shape)) <= self.bound for x in node.local.values()):
            return "whole", ()
        if all(is_part(x, value, self.bound) for x in node.local.values()):
            return "part", ()
        for how, ranks, joined in self.joined(node):
            if is_part(joined, value, self.bound):
                return how, ranks
        return None

    def joined(self, node: Node) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """What the ranks' tensors are together."""
        for ranks in self.groups:
            if any(rank not in node.local for rank in ranks) or len({node.local[rank].shape for rank in ranks}) != 1:
                continue
            first = node.local[ranks[0]]
            if not first.is_floating_point() and not first.is_complex():
                continue
            stacked = torch.stack([node.local[rank] for rank in ranks])
            for how in _ways(node, first):
                yield how, ranks, _JOINED[how](stacked)


NORMS: tuple[str, ...] = ("norm", "linalg_vector_norm", "_foreach_norm")
SUMMANDS = (*_JOINED,)
"""In which ways ranks have a value together."""
MOVES = ("clone", "copy", "stack", "cat", "_to_copy")


def _ways(node: Node, part: Tensor) -> Sequence[str]:
    """In which ways ranks may have a value together."""
    if part.is_complex() or not part.numel():
        return ("sum", "mean")
    if node.name in NORMS:
        return ("norm",)
    if any(word in node.name for word in ("max", "min")):
        return ("max", "min")
    return ("sum", "mean", "max", "min") if node.message or node.name in MOVES else ("sum", "mean")


def wrong_ranks(held: Whole, right: Tensor, bound: float) -> tuple[int, ...]:
    """The ranks whose part is not the right one; of a pending value all of them."""
    if held.value is None or held.value.shape != right.shape or held.layout.pending:
        return tuple(held.local)
    scale = scale_of(right)
    mesh = held.layout.mesh

    def off(rank: int) -> float:
        want = held.layout.local_part(right, mesh.coordinate(rank))
        return apart(held.local[rank], want) * scale_of(held.local[rank], want)

    return tuple(rank for rank in held.local if off(rank) > bound * scale)


def _in_shape_of(held: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """A whole tensor and one card's in one shape, where they are the same numbers in order, or one of them is expanded."""
    if held.numel() == value.numel():
        return held, value.reshape(held.shape)
    try:
        a, b = torch.broadcast_tensors(held, value)
    except RuntimeError:
        return None
    return (a, b) if a.shape in (held.shape, value.shape) else None


def is_part(part: Tensor, value: Tensor, bound: float) -> bool:
    """Whether a rank's tensor is the value, or a block of it."""
    if part.dim() != value.dim():  # a dim of size one more or less
        part, value = part.squeeze(), value.squeeze()
    if part.shape == value.shape and apart(part, value) <= bound:
        return True
    return part.dim() == value.dim() and part.shape != value.shape and block_in(part, value, bound) is not None
