"""transfer: move a tensor from a layout on one mesh to a layout on another. Pure: who sends which box to whom.

Any two meshes: disjoint, overlapping, nested, ranks permuted, other shapes. Each element is sent once to each rank that
needs it and does not have it, and never otherwise: ``Transfer.bytes`` equals ``lower_bound``. Replicas share the sending.

Between hosts, where links are slow, an element crosses once for each host that lacks it: ``Transfer.far_bytes`` equals
``far_lower_bound``. The ranks of a host that need the same box each take a part of it from outside and then give that
part to the others, which is an all-gather within the host. Every rank that takes a part needs it, so that nothing is
sent in addition: the first bound holds as well.

Source: the two-level all-gather of hierarchical collectives (for example Zeng et al., MiCS, 2022), for any two layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from onecard.machine.cost import MACHINE, Link, Machine
from onecard.place.boxes import Box, meet, split, volume
from onecard.place.layout import Layout
from onecard.place.reductions import reduction

Shape = tuple[int, ...]
Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host; () where all share one, or nobody knows


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """A box of the whole tensor that one rank gives to another (or to itself, which costs no message).

    ``hop`` is 0 for what a rank has from the beginning, 1 for what it passes on after it has come from another host.
    """

    sender: int
    receiver: int
    box: Box
    hop: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A plan: the pieces, in an order that all ranks agree on.

    Attributes:
        pieces: all of them; ``source`` and ``target`` layouts; ``shape`` and ``itemsize`` of the whole tensor.
        hosts: which ranks share a host.
    """

    pieces: tuple[TransferPiece, ...]
    source: Layout
    target: Layout
    shape: Shape
    itemsize: int
    hosts: Hosts = ()
    machine: Machine = MACHINE

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending."""
        return tuple(sorted({*self.source.mesh.process_ids, *self.target.mesh.process_ids}))

    @property
    def bytes(self) -> int:
        """Bytes that all ranks together send."""
        return sum(volume(p.box) for p in self.pieces if p.sender != p.receiver) * self.itemsize

    @property
    def far_bytes(self) -> int:
        """Those of them that go to another host."""
        return sum(volume(p.box) for p in self._far()) * self.itemsize

    def sent_by(self, rank: int) -> int:
        """Bytes that one rank sends."""
        return sum(volume(p.box) for p in self.pieces if p.sender == rank != p.receiver) * self.itemsize

    def far_by(self, rank: int, machine: Machine) -> int:
        """Those that go to another host, as far as the machine tells hosts apart."""
        far = [p for p in self.pieces if p.sender == rank and machine.is_far(rank, p.receiver)]
        return sum(volume(p.box) for p in far) * self.itemsize

    @property
    def seconds(self) -> float:
        """Expected time: that of the rank that takes longest to send."""
        near: Counter[int] = Counter()
        far: Counter[int] = Counter()
        for piece in self.pieces:
            near[piece.sender] += volume(piece.box) * self.itemsize * (piece.sender != piece.receiver)
        for piece in self._far():
            far[piece.sender] += volume(piece.box) * self.itemsize
        return max((self.machine.message(near[rank], far[rank]) for rank in near), default=0.0)

    def seconds_of(self, rank: int, machine: Machine, link: Link | None = None) -> float:
        """Expected time of one rank on a machine: to send its pieces or to receive them, whichever is longer.

        Which of them go to another host, the machine says if it tells hosts apart (``per_host``), else ``hosts``.
        """
        far = {id(p) for p in self._far()} if not machine.per_host else ()
        sent, taken = [0, 0], [0, 0]
        for piece in self.pieces:
            if piece.sender != piece.receiver and rank in (piece.sender, piece.receiver):
                count = volume(piece.box) * self.itemsize
                both = sent if piece.sender == rank else taken
                both[0] += count
                both[1] += count * (id(piece) in far or machine.is_far(piece.sender, piece.receiver))
        return max(machine.message(count, beyond, link) for count, beyond in (sent, taken))

    def _far(self) -> Iterator[TransferPiece]:
        host = _host_of(self.hosts)
        return (p for p in self.pieces if host.get(p.sender) != host.get(p.receiver))

    def bounds(self) -> str:
        """What is sent beside the least that can do, in words."""
        least = lower_bound(self.shape, self.itemsize, self.source, self.target)
        text = f"all ranks send {self.bytes:,} bytes, at least {least:,} are needed"
        if self.hosts:
            far = far_lower_bound(self.shape, self.itemsize, self.source, self.target, self.hosts)
            text += (
                f"; between hosts {self.far_bytes:,}, at least {far:,}; within hosts {self.bytes - self.far_bytes:,}"
            )
            text += f", at least {least - far:,}"
        return text


def box_of(layout: Layout, shape: Shape, rank: int) -> Box:
    """The part of the whole tensor that a rank holds."""
    return layout.box(shape, layout.mesh.coordinate(rank))


def reduced_source(layout: Layout, shape: Shape) -> Layout:
    """Where to bring a pending tensor before it leaves its mesh: summed, and cut where that saves half of the message."""
    if layout.merged:
        return layout.reduced()
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
def plan_transfer(
    shape: Shape, itemsize: int, source: Layout, target: Layout, hosts: Hosts = (), machine: Machine = MACHINE
) -> Transfer:
    """Who sends which box to whom.

    Args:
        shape, itemsize: of the whole tensor.
        source: a layout without pending axes (see ``reduced_source``).
        target: any layout on any mesh; of a pending one only the ranks receive that must hold a value.
        hosts: the ranks of each host; those that are not named share one.
        machine: what it is priced with.

    Example:
        >>> from onecard.place.mesh import ProcessMesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> one, two = ProcessMesh([0, 1], ["x"]), ProcessMesh([2, 3], ["x"])
        >>> plan = plan_transfer((2, 3), 4, Layout.of(one, 2, [Replicate()]), Layout.of(two, 2, [Shard(0)]))
        >>> [(p.sender, p.receiver, p.box) for p in plan.pieces], plan.bytes
        ([(0, 2, ((0, 1), (0, 3))), (1, 3, ((1, 2), (0, 3)))], 24)
        >>> whole = Layout.of(two, 2, [Replicate()])
        >>> plan = plan_transfer((2, 3), 4, Layout.of(one, 2, [Replicate()]), whole, hosts=((0, 1), (2, 3)))
        >>> [(p.sender, p.receiver, p.hop) for p in plan.pieces], plan.bytes, plan.far_bytes
        ([(0, 2, 0), (2, 3, 1), (1, 3, 0), (3, 2, 1)], 48, 24)
    """
    dispatch = _Dispatch(hosts)
    wanted = _by_box(target, shape, _receivers(target))
    for box, holders in _by_box(source, shape, source.mesh.process_ids).items():
        common = {need: meet(box, need) for need in wanted}
        dispatch.serve(holders, [(part, wanted[need]) for need, part in common.items() if part is not None])
    return Transfer(tuple(dispatch.pieces), source, target, shape, itemsize, hosts, machine)


class _Dispatch:
    """Gathers the pieces; of several ranks that could send or take one, that with the least so far does."""

    def __init__(self, hosts: Hosts) -> None:
        self.pieces: list[TransferPiece] = []
        self._host = _host_of(hosts)
        self._sent: Counter[int] = Counter()
        self._sent_far: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()

    def serve(self, holders: Collection[int], wanted: Sequence[tuple[Box, Sequence[int]]]) -> None:
        """Bring boxes that some ranks all hold to the ranks that need each, host by host."""
        held = set(holders)
        away = sum(rank not in held for _, receivers in wanted for rank in receivers)
        parts = -(-len(holders) // max(away, 1))  # where more ranks could send than receive, all send
        for box, receivers in wanted:
            self.pieces += [TransferPiece(rank, rank, box) for rank in receivers if rank in held]
            for host, here in _by(self._host.get, (rank for rank in receivers if rank not in held)).items():
                near = [rank for rank in holders if self._host.get(rank) == host]
                if near:
                    self._within(split(box, parts), near, here)
                else:
                    self._across(split(box, parts * len(here)), holders, here)

    def _within(self, parts: Sequence[Box], holders: Collection[int], receivers: Sequence[int]) -> None:
        for receiver in receivers:
            self.pieces += [TransferPiece(_take_turns(holders, self._sent, part), receiver, part) for part in parts]

    def _across(self, parts: Sequence[Box], holders: Collection[int], receivers: Sequence[int]) -> None:
        """Each part crosses once, to a rank that needs it; that one passes it on."""
        for part in parts:
            sender, first = _take_turns(holders, self._sent_far, part), _take_turns(receivers, self._taken, part)
            self.pieces.append(TransferPiece(sender, first, part))
            self.pieces += [TransferPiece(first, other, part, hop=1) for other in receivers if other != first]


def _take_turns(ranks: Iterable[int], load: Counter[int], box: Box) -> int:
    """The rank that has least to do, after this box was added to it."""
    rank = min(ranks, key=lambda r: (load[r], r))
    load[rank] += volume(box)
    return rank


def lower_bound(shape: Shape, itemsize: int, source: Layout, target: Layout) -> int:
    """The fewest bytes that can do it: what each receiver needs less what it has already."""
    total = 0
    for receiver in _receivers(target):
        need = box_of(target, shape, receiver)
        have = meet(need, box_of(source, shape, receiver)) if receiver in source.mesh else None
        total += volume(need) - (volume(have) if have is not None else 0)
    return total * itemsize


def far_lower_bound(shape: Shape, itemsize: int, source: Layout, target: Layout, hosts: Hosts) -> int:
    """The fewest bytes between hosts: what the ranks of each host need less what any of them has already."""
    host, total = _host_of(hosts), 0
    receivers = _receivers(target)
    for number in {host.get(rank) for rank in receivers}:
        # Two boxes of one layout are equal or have nothing in common, so sets of them add up.
        needs = {box_of(target, shape, rank) for rank in receivers if host.get(rank) == number}
        held = {box_of(source, shape, rank) for rank in source.mesh.process_ids if host.get(rank) == number}
        here = (meet(need, have) for need in needs for have in held)
        total += sum(map(volume, needs)) - sum(volume(box) for box in here if box is not None)
    return total * itemsize


def _host_of(hosts: Hosts) -> dict[int, int]:
    return {rank: number for number, ranks in enumerate(hosts) for rank in ranks}


def _by(key: Callable[[int], Any], ranks: Iterable[int]) -> dict[Any, list[int]]:
    """The ranks grouped by what is said of each."""
    found: dict[Any, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def _by_box(layout: Layout, shape: Shape, ranks: Iterable[int]) -> dict[Box, list[int]]:
    return _by(lambda rank: box_of(layout, shape, rank), ranks)


def _receivers(target: Layout) -> Sequence[int]:
    """The ranks that must hold a value: under a pending sum the first along each pending axis, under a maximum all."""
    ranks = []
    for rank in target.mesh.process_ids:
        place = target.mesh.coordinate(rank) or ()
        if all(reduction(op).idempotent or place[axis] == 0 for axis, op in target.pending):
            ranks.append(rank)
    return ranks
