"""Grouped products on rows: each row goes to the rank of its expert, the products there are local, and rows stay there.

``grouped_mm(x, weights, offs)``: ``offs`` are the ends of the experts' rows, so every rank knows the expert of every row. Where
experts are cut, their rows' owners along those axes are theirs; along others rows stay where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard.place.layout import Layout
from onecard.place.parts import Dim, axes_of, is_merged
from onecard.recorded import unrecorded
from onecard.rules.call import Call, named
from onecard.rules.registry import find
from onecard.rules.table.grouped import grouped_rows, grouped_sums
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch.build import build
from onecard.tensor.dispatch.entries import program
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.rows.one_call import in_one
from onecard.tensor.rows.owners import Owners, of_dim
from onecard.tensor.rows.rows import (
    Rows,
    agreed,
    as_rows,
    knows,
    layouts_of,
    made,
    nothing,
    run_small,
    small,
    unknown,
    without,
)
from onecard.tensor.spec import Spec

aten = torch.ops.aten
grouped_mm = aten._grouped_mm.default


class _Grouped:
    """A grouped product of ordinary tensors whose experts are cut: by rows, unless the step must not hold any."""

    simple = False

    def __init__(self, func: Any) -> None:
        self.func = func
        self.ordinary: Any = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if not unknown():
            made = _in_one(self.func, args, kwargs)
            if made is not NotImplemented:
                return made
        if self.ordinary is None:
            with unrecorded():
                self.ordinary = build(self.func, args, kwargs)
        return self.ordinary(args, kwargs)


@program(grouped_mm)
def _decide(func: Any, args: Any, kwargs: Any) -> Any:
    x, weights = args[:2]
    cut = isinstance(weights, DistTensor) and weights.dim() == 3 and weights._spec.layout.axes(0)
    return _Grouped(func) if cut and isinstance(x, Tensor) and x.dim() == 2 else build(func, args, kwargs)


@knows(grouped_mm)
def run(func: Any, args: Any, kwargs: Any) -> Any:
    """A grouped product of rows, or NotImplemented."""
    given = named(func, args, kwargs)
    x, weights = given["self"], given["mat2"]
    offs, bias, dtype = (given.get(name) for name in ("offs", "bias", "out_dtype"))
    if offs is None or bias is not None or dtype not in (None, x.dtype):
        return NotImplemented
    if (x.dim(), weights.dim()) == (2, 3):
        return _times_weights(x, weights, offs)
    return _gradient(x, weights, offs) if (x.dim(), weights.dim()) == (2, 2) else NotImplemented


_in_one = in_one(run)


class Groups(NamedTuple):
    """Where the rows of each expert end, for some owners of the rows.

    Attributes:
        ends: on every rank; ``version``: what changes when somebody writes to them.
        cut: how the experts are cut; ``number``: how many there are.
        owners: the rows at their experts; None: where they are.
        local: where those of this rank's experts end among its rows.
    """

    ends: Tensor
    version: int | None
    cut: Dim
    number: int
    owners: Owners | None
    local: Tensor

    def are(self, ends: Tensor, cut: Dim, number: int) -> bool:
        same = self.ends is ends and not ends.is_inference() and self.version == ends._version
        return same and (self.cut, self.number) == (cut, number)


def _ends(offs: Any) -> Tensor:
    """Where each expert's rows end, on every rank of the mesh."""
    if not isinstance(offs, DistTensor):
        return offs
    if not offs._spec.here:
        return torch.zeros(len(offs), dtype=offs.dtype, device=offs._spec.device)
    target = Layout.replicated(offs.mesh, 1)
    return offs._become(target, "_grouped_mm", "offs", "which rows go where", explicit=False)


def _times_weights(x: Any, weights: Any, offs: Any) -> Any:
    if not isinstance(weights, DistTensor) or isinstance(weights, Rows) or is_merged(weights._spec.layout.dims[0]):
        return NotImplemented
    if isinstance(x, Rows) and x._along != 0:
        return NotImplemented
    mesh, layout = weights.mesh, weights._spec.layout
    ends = _ends(offs)
    owners, local = _at_experts(_owners_of(x, mesh, ends.device), ends, layout.dims[0], weights.shape[0])
    bare = Layout.make(
        mesh,
        tuple(
            d if i == 0 else tuple(a for a in d if a not in owners.axes)
            for i, d in enumerate(layout.in_one_piece().dims)
        ),
        tuple(p for p in layout.pending if p[0] not in owners.axes),
    )
    mine = weights._become(bare, "_grouped_mm", "mat2", "whole for rows of any rank", explicit=False)
    found = as_rows(x, 0, owners, "_grouped_mm", "self")
    if found is None:
        return NotImplemented
    values, along = found
    other = without(bare, owners.axes)
    if _idle(along) and _idle(other):
        result = grouped_rows(values, mine, local) if owners.here else values
        made_layout = Layout.replicated(mesh, 2)
    else:
        layouts = [along or Layout.replicated(mesh, 2), other, Layout.replicated(mesh, 1)]
        result, lie = _apart((x, weights, ends), (values, mine, local), layouts, (0, 0, 0), owners)
        if lie is None or lie.axes(0):
            return NotImplemented
        made_layout = lie
    like = torch.empty((x.shape[0], weights.shape[2]), dtype=result.dtype, device="meta")
    return made(result, made_layout, like, 0, owners, result.device)


def _apart(
    whole: Any, here: Any, layouts: list[Layout], dims: tuple[int, ...], owners: Owners
) -> tuple[Any, Layout | None]:
    """A grouped product of this rank's rows and experts, which lie along other axes, too; and how the result lies along these."""
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in whole]
    call = Call(grouped_mm, metas, {})
    row = find(grouped_mm)
    assert row is not None
    call.results = row.results_of(call)
    bound = row.bound_for(call)
    lie = None if bound is None else layouts_of(call, bound, layouts)
    if lie is None:
        return None, None
    if not owners.here:
        return nothing(whole[0].dtype, owners.mine.device), lie[0]
    given = [small(v, lay, meta, d) for v, lay, meta, d in zip(here, layouts, metas, dims, strict=True)]
    return agreed(run_small(grouped_mm, given, {}), lie[0], "_grouped_mm"), lie[0]


def _idle(layout: Layout | None) -> bool:
    return layout is None or layout.is_replicated


def _owners_of(x: Any, mesh: Any, device: torch.device) -> Owners:
    if isinstance(x, Rows):
        return x._owners
    dim = x._spec.layout.dims[0] if isinstance(x, DistTensor) else ()
    return of_dim(mesh, x.shape[0], dim, device)


def _at_experts(start: Owners, ends: Tensor, cut: Dim, experts: int) -> tuple[Owners, Tensor]:
    """The owners of rows at their experts, and where this rank's experts' rows end among its own.

    Rows of no expert, behind the last one's, are with the last expert.
    """
    known = start.groups
    if known is not None and known.are(ends, cut, experts):
        return known.owners or start, known.local
    found = start.in_use()
    if cut:
        places = {a: p[_experts(start, ends)] for a, p in of_dim(start.mesh, experts, cut, ends.device).places.items()}
        found = Owners(start.mesh, start.size, start.places | places, start.home, cut)
    local = _local_ends(found, ends, cut, experts)
    version = None if ends.is_inference() else ends._version
    groups = Groups(ends, version, cut, experts, None, local)
    start.groups = groups._replace(owners=found if found is not start else None)
    found.groups = groups
    return found, local


def _experts(owners: Owners, ends: Tensor) -> Tensor:
    """The number of each row's expert."""
    numbers = torch.arange(owners.size, device=ends.device)
    return torch.searchsorted(ends.long(), numbers, right=True).clamp_(max=len(ends) - 1)


def _local_ends(owners: Owners, ends: Tensor, cut: Dim, experts: int) -> Tensor:
    coordinate = owners.mesh.coordinate()
    if coordinate is None:
        return ends
    first, count = Layout.make(owners.mesh, (cut,)).bounds((experts,), 0, coordinate)
    return torch.searchsorted(owners.mine, ends[first : first + count].long()).to(torch.int32)


def _gradient(x: Any, y: Any, offs: Any) -> Any:
    """``x (k, rows)`` by ``y (rows, n)`` for each expert: of this rank's experts where all of their rows are here."""
    rows = [r for r, dim in ((x, 1), (y, 0)) if isinstance(r, Rows) and r._along == dim]
    if not rows:
        return NotImplemented
    owners = max(rows, key=lambda r: (r._owners.moved, len(r._owners.places)))._owners
    ends, mesh = _ends(offs), owners.mesh
    owners, local = _at_experts(owners, ends, owners.experts, len(ends))
    found = [as_rows(r, dim, owners, "_grouped_mm", name) for r, dim, name in ((x, 1, "self"), (y, 0, "mat2"))]
    if None in found:
        return NotImplemented
    (a, one), (b, other) = found  # type: ignore[misc]
    cut = owners.experts
    if _idle(one) and _idle(other):
        result = grouped_sums(a, b, local) if owners.here else a
        along = Layout.replicated(mesh, 3)
    else:
        layouts = [lay or Layout.replicated(mesh, 2) for lay in (one, other)]
        layouts.append(Layout.replicated(mesh, 1))
        result, lie = _apart((x, y, ends), (a, b, local), layouts, (1, 0, 0), owners)
        if lie is None:
            return NotImplemented
        along = lie
    pending = tuple(sorted((*along.pending, *((axis, "sum") for axis in owners.axes if axis not in axes_of(cut)))))
    shape = torch.Size((len(ends), x.shape[0], y.shape[1]))
    like = torch.empty(shape, dtype=result.dtype, device="meta")
    spec = Spec.like(Layout.make(mesh, (cut, *along.dims[1:]), pending), like, result.device)
    return wrap(strides.place(spec)(result) if owners.here else result, spec)
