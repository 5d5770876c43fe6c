"""Messages of many tensors in buckets: pending sums made whole or cut, and cut tensors joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch import fakes
from onecard.comm.base import record
from onecard.comm.base.state import Kept, machine
from onecard.comm.issue import collectives, groups
from onecard.comm.issue.by_rank import Runs, packed, runs_of, unpack
from onecard.comm.issue.groups import Group
from onecard.comm.issue.run import lengths, run_or_start
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import Path
from onecard.tensor.aliasing import memory
from onecard.tensor.dist_tensor import DistTensor, announce
from onecard.tensor.room import Room

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel; a tensor that fills a bucket alone is summed where it lies
LARGE = 2**20  # bytes from which, on a CPU, a copy into a bucket takes longer than a message of its own takes to start
Item = TypeVar("Item")

apart: Kept[bool] = Kept(bool)
"""Whether each tensor travels alone: for recordings that are cut into stages, of which each has other parameters."""


@recorded.moves
def reduce_all(tensors: Sequence[Any], name: str = "reduce_partial", explicit: bool = True) -> None:
    """Sum every pending tensor of a list in place, in buckets: one message for many small tensors.

    Gradients that an optimizer wants cut are cut (``DistTensor._due``), and so need no message of their whole size.

    Args:
        tensors: DistTensors and others (left alone), on one or several meshes. They are summed from the last to the first, as
            ``backward`` makes the gradients of a list of parameters: a recording can start each sum when it is ready.
        name: the operator that needs them, for ``explain``.
    """
    chosen = [*{id(t): t for t in tensors if isinstance(t, DistTensor)}.values()]
    for due in {id(x._due): x._due for x in chosen if x._due is not None and x._spec.layout.pending}.values():
        due()
    start_reduce(chosen[::-1], name, explicit, later=False)()


def start_reduce(
    tensors: Sequence[DistTensor], name: str, explicit: bool = False, later: bool = True, label: str = "self"
) -> Callable[[], None]:
    """Start the sums of pending tensors, in buckets; what it gives waits for them, and makes the tensors whole.

    ``later``: whether they are left under way; the tensors may not be read before the end then. ``label``: which of several such
    calls this is: ranks that make them in another order learn of it.
    """
    buckets: dict[Any, list[DistTensor]] = {}
    for x in tensors:
        layout = x._spec.layout
        if layout.pending and (not x._spec.here or all(layout.mesh.shape[axis] == 1 for axis, _ in layout.pending)):
            memory.adopt(x, x._local)
        elif layout.pending:
            buckets.setdefault((layout.mesh, layout.pending, x.dtype, x._spec.device), []).append(x)
    ends = [
        _start_bucket(bucket, name, explicit, later, label)
        for members in buckets.values()
        for bucket in _messages(members, lambda x: x._local)
    ]

    def end() -> None:
        for each in ends:
            each()

    return end


def fill(members: Iterable[Item], nbytes: Callable[[Item], int], most: int | None = None) -> list[list[Item]]:
    """The members in their order, in lists of at most ``BUCKET_BYTES`` (or ``most``, which is less) or of one."""
    buckets: list[list[Item]] = [[]]
    room = most = BUCKET_BYTES if most is None else min(most, BUCKET_BYTES)
    for x in members:
        if nbytes(x) > room and buckets[-1]:
            buckets.append([])
            room = most
        buckets[-1].append(x)
        room -= nbytes(x)
    return buckets


def _messages(members: Sequence[Item], local: Callable[[Item], Tensor]) -> list[list[Item]]:
    """The members in lists that travel together: on a CPU, large ones alone, from and to where they lie.

    Those come first: each is there before the last of the small ones is, and in a recording messages keep their order.
    """
    if apart.here:
        return [[x] for x in members]
    large = [x for x in members if local(x).nbytes >= LARGE and local(x).device.type == "cpu"]
    chosen = {id(x) for x in large}
    small = [x for x in members if id(x) not in chosen]
    return [[x] for x in large] + [bucket for bucket in fill(small, lambda x: local(x).nbytes) if bucket]


def _start_bucket(bucket: list[DistTensor], name: str, explicit: bool, later: bool, label: str) -> Callable[[], None]:
    x, layout = bucket[0], bucket[0]._spec.layout
    if len(bucket) == 1 and not later:
        x._become(layout.reduced(), name, "self", "summed once, where it is needed whole", explicit)
        return _nothing
    alone = len(bucket) == 1 and x._local.is_contiguous() and memory.alone(x)
    flat = x._local.view(-1) if alone else torch.cat([x._local.reshape(-1) for x in bucket])
    shape = _together(bucket)
    in_steps = False
    if record.observers.here or (machine.here.per_host and len(layout.pending) > 1):
        one_dim = Layout.make(layout.mesh, ((),), layout.pending)
        steps = resharding.plan((flat.numel(),), flat.element_size(), one_dim, one_dim.reduced(), machine.here)
        announce(steps, name, "self", shape, "summed once, in a bucket", explicit, len(bucket))
        in_steps = any(step.kind != "all_reduce" for step in steps)  # inside hosts, between them, inside
    sources = [recorded.source_of(x) for x in bucket]
    record.serving.here = (name, label, shape)
    if in_steps:
        coming, others = run_or_start(steps, flat, (flat.numel(),), later), []
    else:
        (axis, op), *others = layout.pending
        coming = collectives.reduced(flat, groups.group(layout.mesh, axis), op, inplace=True, later=later)

    def end() -> None:
        total = coming.wait()
        record.serving.here = (name, label, shape)
        parts = _along(others, layout, total).split([x._local.numel() for x in bucket])
        for x, part, source in zip(bucket, parts, sources, strict=True):
            whole = part.view(x._local.shape)
            recorded.laid(whole, x._spec.with_layout(x._spec.layout.reduced()), source)
            memory.adopt(x, whole)

    return end


def _together(bucket: Sequence[DistTensor]) -> tuple[int]:
    """The whole shape of a bucket, for descriptions: equal on all ranks, also where other axes cut the tensors unevenly."""
    return (sum(x.numel() for x in bucket),)


def _along(pending: Sequence[tuple[int, str]], layout: Layout, flat: Tensor) -> Tensor:
    """What is left to be summed, along other axes."""
    for axis, op in pending:
        flat = collectives.all_reduce(flat, groups.group(layout.mesh, axis), op, inplace=True)
    return flat


def _nothing() -> None:
    pass


def reduce_first(func: Any, paths: Sequence[Path], name: str) -> Callable[..., Any]:
    """The operator, after the tensors at these places of a list were reduced together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        reduce_all([(args[at] if isinstance(at, int) else kwargs[at])[i] for at, i in paths], name, explicit=False)
        return func(*args, **kwargs)

    return call


# ---- A pending sum of which each rank keeps a part, and parts that are joined again


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A tensor that one more axis may cut, and the memory of this rank's part without that cut.

    Attributes:
        x: the tensor, or another one that lies like it (its gradient).
        whole: this rank's part where the axis does not cut.
        layout: the layout with the cut; ``dim`` is the dim that ``axis`` cuts, innermost.
    """

    x: DistTensor
    whole: Tensor
    layout: Layout
    axis: int
    dim: int

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh of the axis."""
        return self.layout.mesh

    def sizes(self) -> list[int]:
        """How many indices of the dim each rank along the axis has."""
        return lengths(self.layout, self.x.shape, self.dim, self.axis)

    def uncut(self) -> Layout:
        """The layout without the cut."""
        return Layout.make(self.mesh, _without(self.layout, self.dim, self.axis), self.layout.pending)

    def own(self) -> Tensor:
        """The memory of this rank's part: a view; all of nothing outside the mesh."""
        if not self.x._spec.here:
            return self.whole
        sizes, index = self.sizes(), groups.group(self.mesh, self.axis).index
        return self.whole.narrow(self.dim, sum(sizes[:index]), sizes[index])


def scatter_all(cuts: Sequence[Cut], name: str) -> list[Tensor]:
    """Bring tensors to their layouts with the cut; a sum that is pending along the axis in one message for many of them.

    Returns:
        This rank's part of each, in memory of its own.
    """
    return start_scatter(cuts, name, later=False)()


def start_scatter(
    cuts: Sequence[Cut], name: str, later: bool = True, label: str = "self", room: Room | None = None
) -> Callable[[], list[Tensor]]:
    """Start ``scatter_all``; what it gives waits for it, and gives the parts. What is more than a sum runs at once.

    ``label``: as of ``start_reduce``.
    """
    found: dict[int, Tensor] = {}
    buckets: dict[Any, list[Cut]] = {}
    for cut in cuts:
        if not cut.x._spec.here:
            found[id(cut)] = cut.whole
        elif _only_sums(cut):
            buckets.setdefault(
                (cut.axis, cut.x._spec.layout.pending, cut.mesh, cut.x.dtype, cut.whole.device), []
            ).append(cut)
        else:
            found[id(cut)] = cut.x._become(cut.layout, name, "grad", "each rank updates its part", explicit=False)
    ends = [
        _scatter_bucket(bucket, dict(pending), axis, name, later, label, room)
        for (axis, pending, *_), members in buckets.items()
        for bucket in _messages(members, lambda cut: cut.whole)
    ]

    def end() -> list[Tensor]:
        for each in ends:
            found.update(each())
        return [found[id(cut)] for cut in cuts]

    return end


def _only_sums(cut: Cut) -> bool:
    """Whether all that is to be done is a reduce-scatter along the axis, and perhaps sums along others."""
    layout = cut.x._spec.layout
    ops = dict(layout.pending)
    if cut.axis not in ops or not {*ops.values()} <= {"sum", "avg"} or cut.layout.merged or cut.whole.is_meta:
        return False
    return layout.dims == _without(cut.layout, cut.dim, cut.axis)


def _without(layout: Layout, dim: int, axis: int) -> tuple[Any, ...]:
    dims = list(layout.dims)
    dims[dim] = tuple(a for a in dims[dim] if a != axis)
    return tuple(dims)


def _scatter_bucket(
    bucket: list[Cut], pending: dict[int, str], axis: int, name: str, later: bool, label: str, room: Room | None
) -> Callable[[], dict[int, Tensor]]:
    op, others = pending[axis], [(a, o) for a, o in pending.items() if a != axis]
    line = groups.group(bucket[0].mesh, axis)
    if line.process_group is None and not others:
        return lambda: {id(cut): cut.whole for cut in bucket}
    wholes, dims, sizes, counts = _lengths(bucket)
    one = bucket[0].whole
    alone = len(bucket) == 1 and bucket[0].dim == 0 and one.is_contiguous()
    flat = one.view(-1) if alone else packed(wholes, dims, sizes)
    _tell(bucket, flat, "reduce_scatter", op, name, label)
    for other, also in others:
        _tell(bucket, flat, "all_reduce", also, name, label, other)
    own, sources = [cut.own() for cut in bucket], [recorded.source_of(cut.x) for cut in bucket]
    into = None if room is None or len({*counts}) > 1 else room.take((label, len(flat)), counts[0], flat)
    coming = collectives.scattered(flat, line, 0, counts, op, into, later)

    def end() -> dict[int, Tensor]:
        record.serving.here = (name, label, _together([cut.x for cut in bucket]))
        part = _along(others, bucket[0].layout, coming.wait())
        split = part.split([each.numel() for each in own])
        pieces = [piece.view(each.shape) for piece, each in zip(split, own, strict=True)]
        for cut, piece, source in zip(bucket, pieces, sources, strict=True):
            recorded.laid(piece, cut.x._spec.with_layout(cut.layout), source)
        return {id(cut): piece for cut, piece in zip(bucket, pieces, strict=True)}

    return end


def gather_all(cuts: Sequence[Cut], name: str) -> None:
    """Fill the memory of tensors without the cut from the ranks' parts: one message for many of them."""
    start_gather(cuts, name, later=False)()


def start_gather(cuts: Sequence[Cut], name: str, later: bool = True, label: str = "self") -> Callable[[], None]:
    """Start ``gather_all``; what it gives waits for it. ``label``: as of ``start_reduce``."""
    buckets: dict[Any, list[Cut]] = {}
    for cut in cuts:
        if cut.x._spec.here:
            buckets.setdefault((cut.mesh, cut.axis, cut.x.dtype, cut.whole.device), []).append(cut)
    ends = [
        _gather_bucket(bucket, groups.group(mesh, axis), name, later, label)
        for (mesh, axis, _, _), members in buckets.items()
        for bucket in _messages(members, lambda cut: cut.whole)
    ]

    def end() -> None:
        for each in ends:
            each()

    return end


def _gather_bucket(bucket: list[Cut], line: Group, name: str, later: bool, label: str) -> Callable[[], None]:
    own, sources = [cut.x._local for cut in bucket], [recorded.source_of(cut.x) for cut in bucket]
    if line.process_group is None:
        for cut, mine in zip(bucket, own, strict=True):
            if not fakes.is_fake(mine) and cut.whole.data_ptr() != mine.data_ptr():
                cut.whole.copy_(mine)
        return _nothing
    wholes, dims, sizes, counts = _lengths(bucket)
    flat = own[0].reshape(-1) if len(own) == 1 else torch.cat([part.reshape(-1) for part in own])
    _tell(bucket, flat, "all_gather", "", name, label)
    if not sum(counts):
        return _nothing
    whole, even = bucket[0].whole, len({*counts}) == 1 and not line.order
    in_place = even and len(bucket) == 1 and bucket[0].dim == 0 and whole.is_contiguous()
    into = whole.view(-1) if in_place else None
    coming = collectives.gathered(flat, line, 0, counts, into, later)

    def end() -> None:
        given = coming.wait()
        if not in_place:
            unpack(wholes, given, dims, sizes)
        for cut, source in zip(bucket, sources, strict=True):
            recorded.laid(cut.whole, cut.x._spec.with_layout(cut.uncut()), source)

    if coming.under_way:
        return end
    end()
    return _nothing


def _lengths(bucket: list[Cut]) -> tuple[list[Tensor], list[int], list[Runs], list[int]]:
    """The memory that tensors fill together, how each is cut, and how many elements each rank has of all."""
    sizes = [cut.sizes() for cut in bucket]
    rows = [cut.whole.numel() // max(cut.whole.shape[cut.dim], 1) for cut in bucket]
    counts = [sum(n * row for n, row in zip(each, rows, strict=True)) for each in zip(*sizes, strict=True)]
    return [cut.whole for cut in bucket], [cut.dim for cut in bucket], [runs_of(each) for each in sizes], counts


def _tell(bucket: list[Cut], flat: Tensor, kind: str, op: str, name: str, label: str, other: int | None = None) -> None:
    """Announce the message of a bucket, as that of one tensor of one dim; ``other``: the axis of a sum of the parts."""
    cut, shape, sent = bucket[0], _together([c.x for c in bucket]), (sum(c.whole.numel() for c in bucket),)
    if other is None:
        record.serving.here = (name, label, shape)
    if not record.observers.here:
        return
    cut_dim, whole_dim = Layout.make(cut.mesh, ((cut.axis,),)), Layout.make(cut.mesh, ((),))
    if kind == "reduce_scatter":
        summands = Layout.make(cut.mesh, ((),), ((cut.axis, op),))
        steps = resharding.plan(sent, flat.element_size(), summands, cut_dim, machine.here)
        reason = "summed once; each rank keeps the part that it updates"
    elif kind == "all_reduce":
        summands = Layout.make(cut.mesh, ((cut.axis,),), ((other, op),))  # type: ignore[arg-type]
        steps = resharding.plan(sent, flat.element_size(), summands, cut_dim, machine.here)
        reason = "the parts, summed along the other axes"
    else:
        steps = resharding.plan(sent, flat.element_size(), cut_dim, whole_dim, machine.here)
        reason = "each rank has updated its part"
    announce(steps, name, "self", shape, reason, False, len(bucket))
