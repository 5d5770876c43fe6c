"""Layout: how a tensor lies on a mesh. For each tensor dim an ordered tuple of axes, plus the pending axes. Pure.

Three written rules that everything else relies on:

* **Sizes.** A dim of size ``n`` over an axis of ``k`` ranks is cut as ``torch.chunk`` cuts it: shards of
  ``ceil(n / k)``, the last ones smaller or empty. Several axes on one dim apply the rule in their order, the
  outermost axis first, each to what the one before it left. A merged dim (see ``Part``) is a row-major product of
  parts, to each of which the rule applies; a rank holds the product of its stretches.
* **Values.** On an axis that is neither in a dim nor pending, all ranks hold equal values. On a pending axis the
  value is the reduction (its operator) over the ranks' local tensors.
* **Gradients.** The gradient of a value is one whole tensor like any other and may have any layout; that of a
  replicated value often arrives pending. It is summed once: when an operator needs it whole (see
  ``DistTensor.reduce_partial``), or in buckets when the optimizer reads the parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from onecard.errors import LayoutError
from onecard.place.boxes import Box, slices
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Axes, Dim, Part, Shape, axes_of, chunk, is_merged, span
from onecard.place.reductions import REDUCTION, REDUCTIONS, commute

# Of a layout that nobody has any more nobody can tell that its successor is another object.
_interned: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


class MergedShard(Shard):
    """What an axis does that cuts one part of a merged dim. Shown by ``placements``; nothing can be laid out by it."""

    def __init__(self, dim: int, part: int, sizes: Sequence[int]) -> None:
        super().__init__(dim)
        self.part, self.sizes = part, tuple(sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MergedShard) and self._words() == other._words()

    def __hash__(self) -> int:
        return hash(self._words())

    def _words(self) -> str:
        return f"Shard({self.dim}, part {self.part} of {list(self.sizes)})"

    __repr__ = __str__ = _words


class Layout:
    """Where each part of a tensor is: ``dims[d]`` are the axes that cut dim ``d``, outermost first.

    Interned: equal layouts are one object. Make one with ``Layout.of`` (from placements) or ``Layout.make``.

    Attributes:
        mesh: the ProcessMesh.
        dims: for each tensor dim, the axes (indices into the mesh) that cut it, outermost first; of a merged dim its Parts.
        merged: whether a dim is merged.
        pending: (axis, operator) for each axis whose ranks hold summands; operators as in ``Partial``.

    Example:
        >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        >>> layout = Layout.of(mesh, 2, [Shard(0), Shard(-1)])
        >>> layout
        dp=Shard(0), tp=Shard(1)
        >>> layout.local_shape((6, 5), (0, 1)), layout.local_offset((6, 5), (0, 1))
        ((3, 2), (0, 3))
    """

    __slots__ = ("__weakref__", "_placements", "dims", "merged", "mesh", "pending")
    mesh: ProcessMesh
    dims: tuple[Dim, ...]
    merged: bool
    pending: tuple[tuple[int, str], ...]
    _placements: tuple[Placement, ...]

    @staticmethod
    def make(mesh: ProcessMesh, dims: tuple[Dim, ...], pending: tuple[tuple[int, str], ...] = ()) -> Layout:
        """The layout with these axes; no check (``Layout.of`` checks)."""
        key = (mesh, dims, pending)
        found = _interned.get(key)
        if found is None:
            found = object.__new__(Layout)
            found.mesh, found.dims, found.pending = mesh, dims, pending
            found.merged = any(map(is_merged, dims))
            found._placements = _placements(found)
            _interned[key] = found
        return found

    @staticmethod
    def of(mesh: ProcessMesh, ndim: int, placements: Sequence[Placement], call: str = "") -> Layout:
        """The layout of a tensor with ``ndim`` dims under one placement for each mesh axis.

        ``call`` is the function that the user called, for the text of errors.

        Paddle's dims mapping is understood as well: for each dim an axis name or None, ``[None, "mp"]``.

        Raises:
            LayoutError: too few or too many placements, a dim that the tensor does not have, or two reductions of which
                one would have to come first (a sum of maxima is not a maximum of sums).
        """
        placements = check_placements(mesh, placements, call)
        dims: list[list[int]] = [[] for _ in range(ndim)]
        pending = []
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                if not -ndim <= placement.dim < ndim:
                    raise LayoutError(
                        f"{as_code(placement)} on axis {mesh.dim_names[axis]!r}: the tensor has {ndim} dim(s), "
                        + (f"so {-ndim} to {ndim - 1} are possible" if ndim else "so only Replicate() or Partial() fit")
                        + f": for example {_example(call, _nearest(placements, ndim))}"
                    )
                dims[placement.dim % ndim].append(axis)
            elif isinstance(placement, Partial):
                pending.append((axis, placement.reduce_op))
        _check_reductions(mesh, placements, pending, call)
        return Layout.make(mesh, tuple(map(tuple, dims)), tuple(pending))

    @staticmethod
    def replicated(mesh: ProcessMesh, ndim: int) -> Layout:
        """The whole tensor on every rank."""
        return Layout.make(mesh, ((),) * ndim)

    @property
    def ndim(self) -> int:
        """Dims of the tensor."""
        return len(self.dims)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis (cannot say the order of several axes on one dim; ``dims`` does)."""
        return self._placements

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the mesh holds the whole value."""
        return not self.pending and not any(self.dims)

    def dim_of(self, axis: int) -> int | None:
        """The tensor dim that an axis cuts, or None."""
        return next((d for d, axes in enumerate(self.dims) if axis in axes_of(axes)), None)

    def axes(self, dim: int) -> Axes:
        """The axes that cut a dim, in one piece or in parts."""
        return axes_of(self.dims[dim])

    def reduced(self) -> Layout:
        """The same layout with every pending axis replicated."""
        return Layout.make(self.mesh, self.dims) if self.pending else self

    def opened(self, shape: Sequence[int]) -> tuple[Layout, Shape]:
        """The ordinary layout of the tensor with its merged dims taken apart, and its shape then.

        Example:
            >>> mesh = ProcessMesh([0, 1], ["x"])
            >>> layout = Layout.make(mesh, ((), (Part(3, ()), Part(4, (0,)))))
            >>> layout, layout.opened((5, 12))
            (x=Shard(1, part 1 of [3, 4]), (x=Shard(2), (5, 3, 4)))
        """
        if not self.merged:
            return self, tuple(shape)
        parts = [d if is_merged(d) else (Part(n, d),) for d, n in zip(self.dims, shape, strict=True)]
        dims = tuple(part.axes for dim in parts for part in dim)
        return Layout.make(self.mesh, dims, self.pending), tuple(part.size for dim in parts for part in dim)

    def in_one_piece(self) -> Layout:
        """The ordinary layout with the same axes on each dim; itself if no dim is merged."""
        return Layout.make(self.mesh, tuple(map(axes_of, self.dims)), self.pending) if self.merged else self

    def bounds(self, shape: Sequence[int], dim: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Offset and length of the shard of one dim at a coordinate of the mesh. Of a merged dim it is no one stretch."""
        if self.merged and is_merged(self.dims[dim]):
            raise LayoutError(
                f"[{self}]: dim {dim} of {list(shape)} is merged, so a rank does not hold one stretch of it"
            )
        offset, length = 0, shape[dim]
        for axis in self.dims[dim]:  # ``span``, without a call: this runs with every step
            start, length = chunk(length, self.mesh.shape[axis], coordinate[axis])
            offset += start
        return offset, length

    def local_shape(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of the local tensor at a coordinate (by default this process; zeros for a rank outside the mesh)."""
        place = self.mesh.coordinate() if coordinate is None else coordinate
        if place is None:
            return (0,) * len(shape)
        if self.merged:
            return tuple(self._length(shape, d, place) for d in range(self.ndim))
        return tuple(
            span(n, axes, self.mesh, place)[1] if axes else n for n, axes in zip(shape, self.dims, strict=True)
        )

    def _length(self, shape: Sequence[int], dim: int, place: Sequence[int]) -> int:
        """The local length of a dim: of a merged one the product of its parts'."""
        parts = self.dims[dim] if is_merged(self.dims[dim]) else ((shape[dim], self.dims[dim]),)
        return prod(span(size, axes, self.mesh, place)[1] for size, axes in parts)

    def largest(self, shape: Sequence[int]) -> int:
        """Elements of the largest shard, which is the first rank's."""
        elements = 1
        for size, dim in zip(shape, self.dims, strict=True):
            for n, axes in dim if is_merged(dim) else ((size, dim),):
                for axis in axes:
                    n = -(-n // self.mesh.shape[axis])  # as ``chunk`` gives the first
                elements *= n
        return elements

    def local_offset(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Index of the local tensor's first element in the whole tensor."""
        place = self.mesh.coordinate() if coordinate is None else coordinate
        if place is None:
            return (0,) * len(shape)
        return tuple(self.bounds(shape, d, place)[0] if axes else 0 for d, axes in enumerate(self.dims))

    def box(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> Box:
        """The part of the whole tensor that a rank holds: (start, stop) of each dim."""
        offsets, lengths = self.local_offset(shape, coordinate), self.local_shape(shape, coordinate)
        return tuple((start, start + length) for start, length in zip(offsets, lengths, strict=True))

    def local_slices(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> tuple[slice, ...]:
        """``box`` as an index."""
        return slices(self.box(shape, coordinate))

    def local_part(self, whole: Tensor, coordinate: Sequence[int] | None = None) -> Tensor:
        """A rank's part of a whole tensor: a view, or of a merged dim a copy.

        Example:
            >>> layout = Layout.make(ProcessMesh([0, 1], ["x"]), ((Part(3, ()), Part(4, (0,))),))
            >>> layout.local_part(torch.arange(12), (1,))
            tensor([ 2,  3,  6,  7, 10, 11])
        """
        if not self.merged:
            return whole[self.local_slices(whole.shape, coordinate)]
        layout, shape = self.opened(whole.shape)
        return whole.reshape(shape)[layout.local_slices(shape, coordinate)].reshape(
            self.local_shape(whole.shape, coordinate)
        )

    def __eq__(self, other: object) -> bool:
        # PyTorch asks ``x.layout == torch.strided`` before it takes the ordinary path; a DistTensor's memory is that.
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.make, (self.mesh, self.dims, self.pending)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __repr__(self) -> str:
        parts = [f"{name}={short(p)}" for name, p in zip(self.mesh.dim_names, self._placements, strict=True)]
        pieces = [axes for d in self.dims for axes in ([p.axes for p in d] if is_merged(d) else [d])]
        swapped = [axes for axes in pieces if list(axes) != sorted(axes)]
        order = "".join(f", {'>'.join(self.mesh.dim_names[a] for a in axes)}" for axes in swapped)
        return ", ".join(parts) + order


def short(placement: Placement) -> str:
    """A placement as a user writes it.

    Example:
        >>> short(Shard(0)), short(Replicate()), short(Partial())
        ('Shard(0)', 'Replicate', 'Partial(sum)')
    """
    if isinstance(placement, MergedShard):
        return repr(placement)
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"Partial({placement.reduce_op})" if isinstance(placement, Partial) else "Replicate"


def as_code(placement: Placement) -> str:
    """A placement as Python.

    Example:
        >>> as_code(Shard(0)), as_code(Replicate()), as_code(Partial())
        ('Shard(0)', 'Replicate()', "Partial('sum')")
    """
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"Partial({placement.reduce_op!r})" if isinstance(placement, Partial) else "Replicate()"


def _nearest(placements: Sequence[Placement], ndim: int) -> list[Placement]:
    """The placements as they fit a tensor with ``ndim`` dims."""
    fits = [p if not isinstance(p, Shard) or -ndim <= p.dim < ndim else Shard(ndim - 1) for p in placements]
    return [p if ndim or not isinstance(p, Shard) else Replicate() for p in fits]


def _example(call: str, placements: Sequence[Placement]) -> str:
    """The call that works, or its placements."""
    listed = f"[{', '.join(map(as_code, placements))}]"
    return f"onecard.{call}(x, mesh, {listed})" if call else listed


def check_placements(mesh: ProcessMesh, placements: Sequence[Placement], call: str = "") -> tuple[Placement, ...]:
    """The placements as a tuple, one for each mesh axis; or a LayoutError that shows the call that works."""
    if not isinstance(mesh, ProcessMesh):
        raise LayoutError(
            f"want a ProcessMesh, not {type(mesh).__name__} ({mesh!r}): onecard.ProcessMesh([0, 1], dim_names=['x']); "
            "a torch DeviceMesh converts with onecard.from_device_mesh(mesh)"
        )
    if isinstance(placements, Placement):
        placements = (placements,)
    placements = tuple(placements)
    if placements and all(p is None or isinstance(p, str) for p in placements):
        placements = _from_dims_mapping(mesh, placements)
    for placement in placements:
        if isinstance(placement, MergedShard):
            raise LayoutError(
                f"{placement!r} says how a merged dim lies, and cannot be asked for. Lay out the tensor with that dim taken "
                f"apart, and merge it again: onecard.reshard(x.unflatten({placement.dim}, {placement.sizes}), mesh, "
                f"[..., Shard({placement.dim + placement.part}), ...]).flatten({placement.dim}, "
                f"{placement.dim + len(placement.sizes) - 1})"
            )
        # A subclass (DTensor's masked or strided placements) means more than its base says.
        if type(placement) not in (Shard, Replicate, Partial):
            raise LayoutError(
                f"{placement!r} is not a placement; use Shard(dim), Replicate() or Partial(), one for each mesh axis"
            )
        if isinstance(placement, Partial) and not REDUCTION.fullmatch(placement.reduce_op):
            raise LayoutError(f"{placement!r}: want one of {', '.join(REDUCTIONS)}, or norm2.0 and the like")
    if len(placements) != mesh.ndim:
        fits = [*placements, *[Replicate()] * mesh.ndim][: mesh.ndim]
        raise LayoutError(
            f"{len(placements)} placement(s) {[short(p) for p in placements]} for a mesh with {mesh.ndim} axes "
            f"{mesh.dim_names}: give one for each axis, for example {_example(call, fits)}"
        )
    return placements


def _check_reductions(
    mesh: ProcessMesh, placements: Sequence[Placement], pending: list[tuple[int, str]], call: str
) -> None:
    if not commute(op for _, op in pending):
        kept = pending[0][1]
        fits = [p if not isinstance(p, Partial) or p.reduce_op == kept else Replicate() for p in placements]
        raise LayoutError(
            " and ".join(f"Partial({op!r}) on axis {mesh.dim_names[axis]!r}" for axis, op in pending)
            + " of one tensor: its value would depend on which is reduced first. Reduce one of them before, for example "
            f"{_example(call, fits)}"
        )


def _from_dims_mapping(mesh: ProcessMesh, mapping: Sequence[Any]) -> tuple[Placement, ...]:
    """Placements from Paddle's older notation: for each tensor dim the name of the axis that cuts it, or None."""
    result: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    for dim, name in enumerate(mapping):
        if name is None:
            continue
        axis = mesh.axis(name)
        if mapping.index(name) != dim:
            raise LayoutError(f"{list(mapping)}: axis {name!r} cuts two dims; an axis can cut one")
        result[axis] = Shard(dim)
    return tuple(result)


def _placements(layout: Layout) -> tuple[Placement, ...]:
    result: list[Placement] = [Replicate() for _ in range(layout.mesh.ndim)]
    for number, dim in enumerate(layout.dims):
        for axis in () if is_merged(dim) else dim:
            result[axis] = Shard(number)
        for at, part in enumerate(dim if is_merged(dim) else ()):
            for axis in part.axes:
                result[axis] = MergedShard(number, at, [p.size for p in dim])
    for axis, op in layout.pending:
        result[axis] = Partial(op)
    return tuple(result)
