"""Messages of many tensors in buckets: pending sums made whole or cut, and cut tensors joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from onecard import resharding as planner
from onecard.comm import collectives, groups, record
from onecard.comm.groups import Group
from onecard.comm.run import lengths
from onecard.comm.state import machine
from onecard.layout import Layout
from onecard.mesh import ProcessMesh
from onecard.rules.call import Path
from onecard.tensor import memory
from onecard.tensor.dist_tensor import DistTensor, announce

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel; a tensor that fills a bucket alone is summed where it lies
Item = TypeVar("Item")


def settle_all(tensors: Sequence[Any], name: str = "settle", explicit: bool = True) -> None:
    """Sum every pending tensor of a list in place, in buckets: one message for many small tensors.

    Args:
        tensors: DistTensors and others (left alone), on one or several meshes.
        name: the operator that needs them, for ``explain``.
    """
    buckets: dict[Any, list[DistTensor]] = {}
    for x in {id(t): t for t in tensors if isinstance(t, DistTensor)}.values():
        layout = x._spec.layout
        if layout.pending and not x._spec.here:
            memory.adopt(x, x._local)
        elif layout.pending:
            buckets.setdefault((layout.mesh, layout.pending, x.dtype, x._spec.device), []).append(x)
    for members in buckets.values():
        for bucket in fill(members, lambda x: x._local.nbytes):
            _settle_bucket(bucket, name, explicit)


def fill(members: Iterable[Item], nbytes: Callable[[Item], int]) -> list[list[Item]]:
    """The members in their order, in lists of at most ``BUCKET_BYTES`` or of one."""
    buckets: list[list[Item]] = [[]]
    room = BUCKET_BYTES
    for x in members:
        if nbytes(x) > room and buckets[-1]:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(x)
        room -= nbytes(x)
    return buckets


def _settle_bucket(bucket: list[DistTensor], name: str, explicit: bool) -> None:
    layout = bucket[0]._spec.layout
    if len(bucket) == 1:
        x = bucket[0]
        x._become(layout.settled(), name, "self", "summed once, where it is needed whole", explicit)
        return
    flat = torch.cat([x._local.reshape(-1) for x in bucket])
    if record.observers.here:
        one_dim = Layout.make(layout.mesh, ((),), layout.pending)
        steps = planner.plan(tuple(flat.shape), flat.element_size(), one_dim, one_dim.settled(), machine.here)
        announce(steps, name, "self", tuple(flat.shape), "summed once, in a bucket", explicit, len(bucket))
    record.serving.here = (name, "self", tuple(flat.shape))
    for axis, op in layout.pending:
        flat = collectives.all_reduce(flat, groups.group(layout.mesh, axis), op, inplace=True)
    for x, part in zip(bucket, flat.split([x._local.numel() for x in bucket]), strict=True):
        memory.adopt(x, part.view(x._local.shape))


def settle_first(func: Any, paths: Sequence[Path], name: str) -> Callable[..., Any]:
    """The operator, after the tensors at these places of a list were settled together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        settle_all([(args[at] if isinstance(at, int) else kwargs[at])[i] for at, i in paths], name, explicit=False)
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

    def parts(self) -> tuple[Tensor, ...]:
        """The memory of each rank's part: views."""
        return self.whole.split(self.sizes(), self.dim)


def scatter_all(cuts: Sequence[Cut], name: str) -> list[Tensor]:
    """Bring tensors to their layouts with the cut; a sum that is pending along the axis in one message for many of them.

    Returns:
        This rank's part of each, in memory of its own.
    """
    found: dict[int, Tensor] = {}
    buckets: dict[Any, list[Cut]] = {}
    for cut in cuts:
        op = _pending_alone(cut)
        if op:
            buckets.setdefault((cut.mesh, cut.axis, op, cut.x.dtype, cut.whole.device), []).append(cut)
        else:
            found[id(cut)] = cut.x._become(cut.layout, name, "grad", "each rank updates its part", explicit=False)
    for (mesh, axis, op, _, _), members in buckets.items():
        for bucket in fill(members, lambda cut: cut.whole.nbytes):
            found |= _scatter_bucket(bucket, groups.group(mesh, axis), op, name)
    return [found[id(cut)] for cut in cuts]


def _pending_alone(cut: Cut) -> str:
    """The reduction, if all that is to be done is a reduce-scatter along the axis; else ""."""
    layout = cut.x._spec.layout
    if len(layout.pending) != 1 or layout.pending[0][0] != cut.axis or cut.layout.merged or cut.whole.is_meta:
        return ""
    return layout.pending[0][1] if layout.dims == _without(cut.layout, cut.dim, cut.axis) else ""


def _without(layout: Layout, dim: int, axis: int) -> tuple[Any, ...]:
    dims = list(layout.dims)
    dims[dim] = tuple(a for a in dims[dim] if a != axis)
    return tuple(dims)


def _scatter_bucket(bucket: list[Cut], line: Group, op: str, name: str) -> dict[int, Tensor]:
    by_rank = list(zip(*(cut.parts() for cut in bucket), strict=True))
    counts = [sum(part.numel() for part in parts) for parts in by_rank]
    one = bucket[0].whole
    alone = len(bucket) == 1 and bucket[0].dim == 0 and one.is_contiguous()
    flat = one.view(-1) if alone else torch.cat([part.reshape(-1) for parts in by_rank for part in parts])
    _tell(bucket, flat, "reduce_scatter", op, name)
    mine = collectives.reduce_scatter(flat, line, 0, counts, op)
    own = by_rank[line.index]
    pieces = mine.split([part.numel() for part in own])
    return {id(cut): piece.view(part.shape) for cut, piece, part in zip(bucket, pieces, own, strict=True)}


def gather_all(cuts: Sequence[Cut], name: str) -> None:
    """Fill the memory of tensors without the cut from the ranks' parts: one message for many of them."""
    buckets: dict[Any, list[Cut]] = {}
    for cut in cuts:
        buckets.setdefault((cut.mesh, cut.axis, cut.x.dtype, cut.whole.device), []).append(cut)
    for (mesh, axis, _, _), members in buckets.items():
        for bucket in fill(members, lambda cut: cut.whole.nbytes):
            _gather_bucket(bucket, groups.group(mesh, axis), name)


def _gather_bucket(bucket: list[Cut], line: Group, name: str) -> None:
    by_rank = list(zip(*(cut.parts() for cut in bucket), strict=True))
    counts = [sum(part.numel() for part in parts) for parts in by_rank]
    own = [cut.x._local for cut in bucket]
    flat = own[0].reshape(-1) if len(own) == 1 else torch.cat([part.reshape(-1) for part in own])
    _tell(bucket, flat, "all_gather", "", name)
    if not sum(counts):
        return
    for parts, given in zip(by_rank, collectives.all_gather(flat, line, 0, counts).split(counts), strict=True):
        pieces = given.split([part.numel() for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.view(part.shape))


def _tell(bucket: list[Cut], flat: Tensor, kind: str, op: str, name: str) -> None:
    """Announce the message of a bucket, as that of one tensor of one dim."""
    cut = bucket[0]
    cut_dim, whole_dim = Layout.make(cut.mesh, ((cut.axis,),)), Layout.make(cut.mesh, ((),))
    shape = (sum(c.whole.numel() for c in bucket),)
    record.serving.here = (name, "self", shape)
    if record.observers.here:
        if kind == "reduce_scatter":
            summands = Layout.make(cut.mesh, ((),), ((cut.axis, op),))
            steps = planner.plan(shape, flat.element_size(), summands, cut_dim, machine.here)
            reason = "summed once; each rank keeps the part that it updates"
        else:
            steps = planner.plan(shape, flat.element_size(), cut_dim, whole_dim, machine.here)
            reason = "each rank has updated its part"
        announce(steps, name, "self", shape, reason, False, len(bucket))
