"""Rows chosen by number, ``x[index]``, of a dim that is cut: each rank has those whose element it has. Nothing is sent.

The gradient goes the same way back: to the ranks that have the elements, where it is added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import DispatchKeySet
from onecard.comm.world import world
from onecard.place.layout import Layout
from onecard.place.parts import axes_of
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch.entries import whole
from onecard.tensor.dispatch.intercept import onward
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.rows.one_call import in_halves, in_one
from onecard.tensor.rows.owners import ChosenRows, Owners, of_dim
from onecard.tensor.rows.rows import Rows, as_rows, made, nothing, spread, unknown, without
from onecard.tensor.spec import Spec, contiguous_stride

aten = torch.ops.aten


@whole(aten.index.Tensor)
def _index(keyset: DispatchKeySet, x: Tensor, indices: list[Tensor | None]) -> Tensor:
    if len(indices) == 1 and indices[0] is not None and _chooses(x, indices[0]):
        return _Choose.apply(x, _positive(indices[0], x.shape[0]))
    if _chooses_elements(x, indices):
        token, place = (_positive(i, n) for i, n in zip(indices, x.shape, strict=False))  # type: ignore[arg-type]
        column = place.view(-1, *[1] * (x.dim() - 1))
        return _Choose.apply(x, token).gather(1, column.expand(-1, 1, *x.shape[2:])).squeeze(1)
    return onward(aten.index.Tensor, keyset, x, _by_number(x, indices))


@whole(aten.masked_select.default)
def _masked_select(keyset: DispatchKeySet, x: Tensor, mask: Tensor) -> Tensor:
    chosen = _by_number(x, [mask]) if x.shape == mask.shape else [mask]
    if chosen[0] is mask:
        return onward(aten.masked_select.default, keyset, x, mask)
    return aten.index.Tensor(x, chosen)


def _by_number(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as numbers, where every rank has the mask and some have no part of x: these know the shape of ``x[mask]`` by it."""
    if not isinstance(x, DistTensor) or unknown() or len(x.mesh.process_ids) == world.get_world_size():
        return indices
    found = list[Tensor | None]()
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and not isinstance(index, DistTensor) and index.dim()
        found += index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]
    return found


def _chooses_elements(x: Tensor, indices: list[Tensor | None]) -> bool:
    """Whether ``x[tokens, places]`` is an element (or more) of each of some rows: the weights of an expert's tokens."""
    if len(indices) != 2 or x.dim() < 2 or not x.shape[1]:
        return False
    token, place = indices
    whole = token is not None and place is not None and place.dim() == 1 and place.dtype in (torch.int64, torch.int32)
    return whole and len(place) == len(token) and _chooses(x, token)  # type: ignore[arg-type]


@whole(aten.index_select.default)
def _index_select(keyset: DispatchKeySet, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if x.dim() and dim % x.dim() == 0 and _chooses(x, index):
        return _Choose.apply(x, index)
    return onward(aten.index_select.default, keyset, x, dim, index)


@whole(aten.index_add.default)
def _index_add(keyset: DispatchKeySet, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    added = _rows_added(x, dim, index, source, alpha)
    if added is None:
        return onward(aten.index_add.default, keyset, x, dim, index, source, alpha=alpha)
    return x + added


@whole(aten.index_add_.default)
def _index_add_(
    keyset: DispatchKeySet, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1
) -> Tensor:
    added = _rows_added(x, dim, index, source, alpha)
    if added is None:
        return onward(aten.index_add_.default, keyset, x, dim, index, source, alpha=alpha)
    return x.add_(added)


def _rows_added(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any) -> Tensor | None:
    """Rows added up by number, on the ranks that have what they are added to; None if they are no rows, or that is not cut."""
    if not isinstance(x, DistTensor) or isinstance(x, Rows) or not isinstance(source, Rows) or source._along:
        return None
    alike = x.shape[1:] == source.shape[1:] and x.dtype == source.dtype and x.mesh is source.mesh
    if not alike or dim % max(x.dim(), 1) or not _chooses(x, index):
        return None
    scaled = source if alpha == 1 else source * alpha
    return _Add.apply(scaled, index, _choice(x, index), x._spec, False)


def _chooses(x: Tensor, index: Tensor) -> bool:
    """Whether ``x[index]`` is rows of a dim that is cut, or of rows."""
    if not isinstance(x, DistTensor) or not x.is_floating_point() or index.dim() != 1 or len(index) < 2:
        return False
    if index.dtype not in (torch.int64, torch.int32) or unknown():
        return False
    if isinstance(index, DistTensor) and index.mesh is not x.mesh:
        return False
    if isinstance(x, Rows):
        return x._along == 0
    layout = x._spec.layout
    cut = layout.axes(0)
    if layout.pending or not any(layout.mesh.shape[a] > 1 for a in cut):
        return False
    return not isinstance(index, DistTensor) or not index._spec.layout.pending


def _positive(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


class _Choose(torch.autograd.Function):
    """``x[index]``. Its gradient is ``_Add``, of which it is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, index: Tensor) -> Tensor:
        choice = _choice(x, index)
        ctx.save_for_backward(index)
        ctx.given = (choice, x._spec, isinstance(x, Rows))
        return _chosen(x, choice, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Add.apply(grads[0], *ctx.saved_tensors, *ctx.given), None


class _Add(torch.autograd.Function):
    """Zeros to which rows are added: what ``_Choose`` gives back."""

    @staticmethod
    def forward(ctx: Any, grad: Any, index: Any, choice: ChosenRows, spec: Spec, rows: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.choice = choice  # as long as it is kept, backward finds it
        if isinstance(grad, Rows) and grad._along:
            spread(grad)
        made = _added(grad, choice, spec, rows)
        if made is NotImplemented:
            spread(grad)
            made = _added(grad, choice, spec, rows)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None, None, None


def _choice(x: Any, index: Tensor) -> ChosenRows:
    """Who has the rows of these numbers."""
    return _of_numbers(x, _numbers(index))


@in_one
def _of_numbers(x: Any, numbers: Tensor) -> ChosenRows:
    source = _source(x)
    return source.chosen(numbers) or source.choose(_checked(numbers, x.shape[0]))


def _source(x: Any) -> Owners:
    """Who has the elements of which rows are chosen."""
    if isinstance(x, Rows):
        return x._owners
    layout = x._spec.layout
    return of_dim(layout.mesh, x.shape[0], layout.dims[0], x._local.device)


def _numbers(index: Tensor) -> Tensor:
    """The numbers of the rows, on every rank of the mesh; one outside of it knows only how many."""
    if not isinstance(index, DistTensor):
        return index.long()
    if not index._spec.here:
        return torch.zeros(len(index), dtype=torch.long, device=index._spec.device)
    target = Layout.replicated(index.mesh, 1)
    return index._become(target, "index", "index", "which rows go where", explicit=False).long()


def _checked(numbers: Tensor, size: int) -> Tensor:
    inside = ((numbers >= 0) & (numbers < size)).all()
    aten._assert_async.msg(inside, f"index: an index is out of range for a dim of size {size}")
    return numbers


@in_one
def _chosen(x: Any, choice: ChosenRows, index: Tensor) -> Rows:
    """The rows; axes that cut the index alone, and nothing of the rows, divide them, too."""
    spec, owners, into = x._spec, choice.owners, choice.into
    if isinstance(index, DistTensor):
        layout = index._spec.layout
        other = tuple(a for a in axes_of(layout.dims[0]) if a not in owners.places)
        columns = {a for dim in spec.layout.dims[1:] for a in axes_of(dim)}
        if other and axes_of(layout.dims[0]) == other and columns.isdisjoint(other):
            extra = of_dim(layout.mesh, owners.size, layout.dims[0], owners.mine.device)
            owners, into = _also(choice, extra.places)
    local = x._held if isinstance(x, Rows) else x._local
    values = local.index_select(0, into) if owners.here else nothing(spec.dtype, spec.device)
    shape = torch.Size((owners.size, *spec.shape[1:]))
    like = torch.empty_strided(shape, contiguous_stride(shape), dtype=spec.dtype, device="meta")
    return made(values, without(spec.layout, owners.axes), like, 0, owners, spec.device)


def _also(choice: ChosenRows, extra: dict[int, Tensor]) -> tuple[Owners, Tensor]:
    """The chosen rows divided along more axes: who has them, and where this rank's stand in the source."""
    given = choice.owners
    owners = Owners(given.mesh, given.size, given.places | extra, given.home, given.experts, given.device)
    return owners, choice.into[given.local(owners.mine)]


@in_halves
def _added(grad: Any, choice: ChosenRows, spec: Spec, rows: bool) -> Tensor:
    source, owners, into = choice.source, choice.owners, choice.into
    extra = {}
    if isinstance(grad, Rows):
        extra = {a: p for a, p in grad._owners.places.items() if a not in owners.places}
    elif isinstance(grad, DistTensor) and grad._spec.layout.axes(0):
        block = of_dim(owners.mesh, owners.size, grad._spec.layout.dims[0], owners.mine.device)
        extra = {a: p for a, p in block.places.items() if a not in owners.places}
    if extra:
        owners, into = _also(choice, extra)
    found = as_rows(grad, 0, owners, "index_backward", "grad")
    if found is None:
        return NotImplemented
    values, layout = found
    mesh, total = owners.mesh, values
    if owners.here:
        total = values.new_zeros(len(source.mine), *values.shape[1:]).index_add_(0, into, values)
    bare = layout if layout is not None else Layout.replicated(mesh, len(spec.shape))
    summed = tuple((a, "sum") for a in extra)
    if rows:
        like = spec.meta()
        kept = Layout.make(mesh, bare.dims, tuple(sorted((*bare.pending, *summed))))
        return made(total, kept, like, 0, source, spec.device)
    dims = (spec.layout.dims[0], *bare.dims[1:])
    target = Spec.make(
        Layout.make(mesh, dims, tuple(sorted((*bare.pending, *summed)))),
        spec.shape,
        spec.stride,
        values.dtype,
        spec.device,
    )
    return wrap(strides.place(target)(total) if owners.here else total, target)
