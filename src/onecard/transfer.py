"""transfer: move a tensor from a layout on one mesh to a layout on another. Pure: who sends which box to whom.

Any two meshes: disjoint, overlapping, nested, ranks permuted, other shapes. Each element is sent once to each rank that
needs it and does not have it, and never otherwise: ``Transfer.bytes`` equals ``lower_bound``. Replicas share the sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from onecard.cost import MACHINE
from onecard.layout import Layout

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # (start, stop) of each dim, in the whole tensor

# A pending value under one of these is itself on every rank; under any other, all ranks but the first hold nothing.
IDEMPOTENT = ("max", "min", "avg", "band", "bor")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the whole tensor that one rank gives to another (or to itself, which costs no message)."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """A plan: the pieces, in an order that all ranks agree on.

    Attributes:
        pieces: all of them; ``source`` and ``target`` layouts; ``shape`` and ``itemsize`` of the whole tensor.
    """

    pieces: tuple[Piece, ...]
    source: Layout
    target: Layout
    shape: Shape
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes that all ranks together send."""
        return sum(volume(p.box) for p in self.pieces if p.sender != p.receiver) * self.itemsize

    def sent_by(self, rank: int) -> int:
        """Bytes that one rank sends."""
        return sum(volume(p.box) for p in self.pieces if p.sender == rank != p.receiver) * self.itemsize

    @property
    def seconds(self) -> float:
        """Expected time: that of the rank that sends most."""
        ranks = {p.sender for p in self.pieces}
        return max((MACHINE.message(self.sent_by(rank)) for rank in ranks), default=0.0)


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(stop - start for start, stop in box)


def box_of(layout: Layout, shape: Shape, rank: int) -> Box:
    """The part of the whole tensor that a rank holds."""
    place = layout.mesh.coordinate(rank)
    return tuple((s.start, s.stop) for s in layout.local_slices(shape, place))


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def settled_source(layout: Layout, shape: Shape) -> Layout:
    """Where to bring a pending tensor before it leaves its mesh: summed, and cut where that saves half of the message."""
    dims = [list(axes) for axes in layout.dims]
    for axis, _ in layout.pending:
        sizes = [
            size // prod(layout.mesh.shape[a] for a in axes) if axes else size
            for size, axes in zip(shape, dims, strict=True)
        ]
        best = int(np.argmax(sizes)) if sizes else -1
        if best >= 0 and sizes[best] >= layout.mesh.shape[axis]:
            dims[best].append(axis)
    return Layout.make(layout.mesh, tuple(map(tuple, dims)))


@lru_cache(maxsize=4096)
def plan_transfer(shape: Shape, itemsize: int, source: Layout, target: Layout) -> Transfer:
    """Who sends which box to whom.

    Args:
        shape, itemsize: of the whole tensor.
        source: a layout without pending axes (see ``settled_source``).
        target: any layout on any mesh; of a pending one only the ranks receive that must hold a value.

    Example:
        >>> from onecard.mesh import ProcessMesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> one, two = ProcessMesh([0, 1], ["x"]), ProcessMesh([2, 3], ["x"])
        >>> plan = plan_transfer((2, 3), 4, Layout.of(one, 2, [Replicate()]), Layout.of(two, 2, [Shard(0)]))
        >>> [(p.sender, p.receiver, p.box) for p in plan.pieces], plan.bytes
        ([(0, 2, ((0, 1), (0, 3))), (1, 3, ((1, 2), (0, 3)))], 24)
    """
    holders: dict[Box, list[int]] = {}
    for rank in source.mesh.process_ids:
        holders.setdefault(box_of(source, shape, rank), []).append(rank)
    load = dict.fromkeys(source.mesh.process_ids, 0)
    pieces = []
    for receiver in _receivers(target):
        need = box_of(target, shape, receiver)
        for box, ranks in holders.items():
            common = meet(box, need)
            if common is None:
                continue
            sender = receiver if receiver in ranks else min(ranks, key=lambda r: (load[r], r))
            if sender != receiver:
                load[sender] += volume(common)
            pieces.append(Piece(sender, receiver, common))
    return Transfer(tuple(pieces), source, target, shape, itemsize)


def lower_bound(shape: Shape, itemsize: int, source: Layout, target: Layout) -> int:
    """The fewest bytes that can do it: what each receiver needs less what it has already."""
    total = 0
    for receiver in _receivers(target):
        need = box_of(target, shape, receiver)
        have = meet(need, box_of(source, shape, receiver)) if receiver in source.mesh else None
        total += volume(need) - (volume(have) if have is not None else 0)
    return total * itemsize


def _receivers(target: Layout) -> Sequence[int]:
    """The ranks that must hold a value: under a pending sum the first along each pending axis."""
    ranks = []
    for rank in target.mesh.process_ids:
        place = target.mesh.coordinate(rank) or ()
        if all(op in IDEMPOTENT or place[axis] == 0 for axis, op in target.pending):
            ranks.append(rank)
    return ranks
