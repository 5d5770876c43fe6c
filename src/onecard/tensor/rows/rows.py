"""Rows: a tensor of which one dim lies where data says, row by row (see ``owners``). Below autograd.

What no layout can say, one can still say truly: a value of which each rank has some rows is a *pending sum*, in which the
rows that a rank lacks are zero. That is the spec of a ``Rows``; its memory leaves the zeros out. Whoever knows nothing of
rows reads ``_local``, or has it settled: then it becomes an ordinary DistTensor of the same value, in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch.names import tree_leaves
from onecard.comm.agree import check, sparse_check
from onecard.comm.base.state import Kept, machine
from onecard.comm.issue import trace
from onecard.comm.world.pretend import pretending
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.place.parts import axes_of
from onecard.rules.call import Call, dtype_of
from onecard.rules.decide import decide
from onecard.rules.rule import Bound
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch.intercept import KEYS
from onecard.tensor.dist_tensor import DistTensor, _has_no_memory, _make, wrap
from onecard.tensor.rows.one_call import in_halves, in_one
from onecard.tensor.rows.owners import Owners, can_move, of_dim
from onecard.tensor.rows.ways import MessageWords, move
from onecard.tensor.spec import Spec

Handler = Callable[[Any, Any, Any], Any]
handlers: dict[Any, Handler] = {}
"""Operators that know rows: (func, args, kwargs) -> result, or NotImplemented."""


class Rows(DistTensor):
    """A DistTensor whose rows along one dim lie where data says. Programs see a DistTensor; its class is that after it settled.

    Attributes:
        _held: this rank's rows; ``_along``: along which dim they are rows; ``_owners``: which of all.
        _view_of: what it is a view of, and how; ``_seen_by``: what is a view of it.
    """

    _in_rows = True
    _held: Tensor
    _along: int
    _owners: Owners
    _view_of: tuple[Rows, Any, Any, Any] | None
    _seen_by: list[weakref.ref[Rows]]

    @property
    def _local(self) -> Tensor:
        """This rank's summand, with zeros for the rows that it lacks: whoever asks knows nothing of rows."""
        spread(self, at_home=False)
        return self._local

    @_local.setter
    def _local(self, value: Tensor) -> None:
        self.__class__ = DistTensor  # type: ignore[assignment]
        self._local = value

    def _refresh(self) -> None:
        spread(self)
        DistTensor._refresh(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if not unknown() and _followed((args, kwargs)):
            made = _on_rows(func, args, kwargs)
            if made is not NotImplemented:
                return made
        settle((args, kwargs))
        return DistTensor.__torch_dispatch__(func, types, args, kwargs)


@in_one
def _on_rows(func: Any, args: Any, kwargs: Any) -> Any:
    return handlers.get(func, _by_rule)(func, args, kwargs)


def _followed(given: Any) -> bool:
    """Whether a recording, if there is one, has seen the rows come up: those of before it are settled."""
    recorder = recorded.recorder
    if recorder is None or not recorder.listens:
        return True
    return all(recorder.knows(x) for x in tree_leaves(given) if isinstance(x, Rows))


ordinary: Kept[bool] = Kept(bool)  # whether what is computed now must be no rows
_default: list[Handler] = []


def by_default(handler: Handler) -> Handler:
    """What runs operators that have no handler of their own."""
    _default[:] = [handler]
    return handler


def _by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    return _default[0](func, args, kwargs)


def knows(*ops: Any) -> Callable[[Handler], Handler]:
    """An operator that knows rows."""

    def enter(run: Handler) -> Handler:
        for op in ops:
            handlers[op] = run
        return run

    return enter


def unknown() -> bool:
    """Whether the step may hold no rows: it is written down, compared, or not really done, so sizes must not be data."""
    recorder = recorded.recorder
    writes_down = recorder is not None and not recorder.rows
    return writes_down or trace.tracing() or trace.faking() or check.on or pretending()


def layout_of(layout: Layout, dim: int, owners: Owners) -> Layout:
    """The layout of rows: pending along the axes that divide them, whatever ``layout`` says of these and of ``dim``."""
    bare = without(layout, owners.axes)
    dims = tuple(() if d == dim else axes for d, axes in enumerate(bare.dims))
    return Layout.make(layout.mesh, dims, tuple(sorted((*bare.pending, *((a, "sum") for a in owners.axes)))))


def without(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout with some axes idle. A merged dim that they do not cut stays as it is: it says which elements a rank has."""
    dims = tuple(
        tuple(a for a in axes_of(dim) if a not in axes) if any(a in axes for a in axes_of(dim)) else dim
        for dim in layout.dims
    )
    return Layout.make(layout.mesh, dims, tuple(p for p in layout.pending if p[0] not in axes))


def wrap_rows(values: Tensor, spec: Spec, dim: int, owners: Owners) -> Rows:
    """Rows outside autograd; ``spec`` has the layout that ``layout_of`` gives."""
    self = _make(Rows, spec.shape, spec.stride, dtype=spec.dtype, device=spec.device, _extra_dispatch_keys=KEYS)
    _has_no_memory(self)
    self._held, self._spec, self._along, self._owners = values, spec, dim, owners
    self._view_of, self._seen_by = None, []
    return self


def made(values: Tensor, layout: Layout, whole: Tensor, dim: int, owners: Owners, device: torch.device) -> Rows:
    """Rows of a tensor that is ``whole`` (meta) on one card, laid out along other axes and dims as ``layout`` says."""
    return wrap_rows(values, Spec.like(layout_of(layout, dim, owners), whole, device), dim, owners)


def spread(x: Rows, at_home: bool = True) -> None:
    """Make rows, and what shares memory with them, ordinary tensors, in place.

    Args:
        at_home: send them where the dim lay of which they were chosen, if they have left; else each rank fills in zeros.
    """
    while x._view_of is not None and isinstance(x._view_of[0], Rows):
        x = x._view_of[0]
    views = list(_family(x))
    if x._view_of is not None:
        _derive(x)
    else:
        _settle(x, at_home)
    for view in views:
        _derive(view)


def settle(values: Any) -> None:
    """The rows among these become ordinary tensors, in place."""
    for x in tree_leaves(values):
        if isinstance(x, Rows):
            with nullcontext() if _followed(x) else recorded.unrecorded():
                spread(x)


def settle_left(values: Any) -> None:
    """What a step leaves is settled, and copies that stand for views are taken again if they are out of date: it ends here."""
    settle(values)
    for x in tree_leaves(values):
        if isinstance(x, DistTensor):
            x._refresh()


def _family(x: Rows) -> list[Rows]:
    """The views of rows that are alive, each after what it is a view of."""
    found = []
    for reference in x._seen_by:
        view = reference()
        if view is not None and isinstance(view, Rows):
            found += [view, *_family(view)]
    return found


def shares(x: Rows) -> bool:
    """Whether others share its memory."""
    return x._view_of is not None or bool(_family(x))


def _derive(view: Rows) -> None:
    base, func, args, at = view._view_of  # type: ignore[misc]
    ordinary.here = True
    try:
        again = DistTensor.__torch_dispatch__(func, (), (base, *args), {})
    finally:
        ordinary.here = False
    view.__class__ = DistTensor  # type: ignore[assignment]
    view._take(again if at is None else again[at])


def _settle(x: Rows, at_home: bool) -> None:
    spec, owners = x._spec, x._owners
    values, layout = _settled(x, at_home)
    x._local = values
    x._spec = spec if layout is spec.layout else spec.with_layout(layout)
    x._local = strides.place(x._spec)(values) if owners.here else values
    x._memory = None


@in_halves
def _settled(x: Rows, at_home: bool) -> tuple[Tensor, Layout]:
    """This rank's part of what rows become, and its layout."""
    spec, owners, dim = x._spec, x._owners, x._along
    if at_home and owners.used and owners.home[1]:
        return _home(x)
    return filled(x._held, dim, owners, spec.shape[dim]), spec.layout


def _home(x: Rows) -> tuple[Tensor, Layout]:
    """This rank's part after rows went home, and its layout: axes that divided rows and not the dim stay pending."""
    spec, owners, dim = x._spec, x._owners, x._along
    cut = owners.settled()
    block = of_dim(owners.mesh, owners.size, cut, owners.mine.device)
    target = block
    if owners.places.keys() != block.places.keys():
        target = Owners(
            owners.mesh, owners.size, owners.places | block.places, owners.home, owners.experts, owners.device
        )
    values = move(x._held, dim, owners, target, MessageWords("combine", "self", spec.layout, tuple(spec.shape)))
    dims = tuple(cut if d == dim else axes for d, axes in enumerate(spec.layout.dims))
    pending = tuple(p for p in spec.layout.pending if p[0] not in block.places)
    if len(target.mine) < len(block.mine):
        values = _among_zeros(values, dim, block.local(target.mine), len(block.mine))
    return values, Layout.make(spec.layout.mesh, dims, pending)


def filled(values: Tensor, dim: int, owners: Owners, size: int) -> Tensor:
    """This rank's rows among zeros for those that it lacks."""
    return _among_zeros(values, dim, owners.mine, size) if owners.here else values


def _among_zeros(values: Tensor, dim: int, rows: Tensor, size: int) -> Tensor:
    shape = list(values.shape)
    shape[dim] = size
    return values.new_zeros(shape).index_copy_(dim, rows, values)


# ---- Operands as rows


def as_rows(x: Any, dim: int, owners: Owners, operator: str, operand: str) -> tuple[Tensor, Layout | None] | None:
    """This rank's rows of an operand, under given owners, and how it lies along other axes; None if that cannot be.

    Plain tensors count as whole on every rank: their layout is None.
    """
    if isinstance(x, Rows):
        if x._along != dim:
            return None
        if x._owners is not owners:
            if not can_move(x._owners, owners) or _busy_along(x, owners.axes):
                return None
            told = MessageWords(operator, operand, x._spec.layout, tuple(x._spec.shape))
            values = move(x._held, dim, x._owners, owners, told)
            if not owners.moved:
                return values, without(x._spec.layout, owners.axes)
            _moved(x, values, owners)  # the backward pass, which may need it too, finds it there
        return x._held, without(x._spec.layout, owners.axes)
    if not isinstance(x, DistTensor):
        return x.index_select(dim, owners.mine), None
    layout = x._spec.layout
    rest = tuple(a for a in owners.axes if a not in layout.axes(dim))
    bare = Layout.make(
        layout.mesh,
        tuple(a if d == dim else tuple(b for b in axes_of(a) if b not in rest) for d, a in enumerate(layout.dims)),
        tuple(p for p in layout.pending if p[0] not in owners.axes),
    )
    if any(a not in owners.axes for a in layout.axes(dim)):
        return None
    local = x._become(bare, operator, operand, "rows go where they are used", explicit=False)
    source = of_dim(layout.mesh, x.shape[dim], layout.dims[dim], local.device)
    told = MessageWords(operator, operand, bare, tuple(x.shape))
    return move(local, dim, source, owners, told), without(bare, owners.axes)


def _busy_along(x: Rows, axes: tuple[int, ...]) -> bool:
    """Whether rows are cut, or wait for a sum, along axes that would divide them from now on."""
    more = {a for a in axes if a not in x._owners.axes}
    layout = x._spec.layout
    return any(a in more for a, _ in layout.pending) or any(a in more for dim in layout.dims for a in axes_of(dim))


def _moved(x: Rows, values: Tensor, owners: Owners) -> None:
    """Rows lie elsewhere from now on: the same value."""
    layout = layout_of(without(x._spec.layout, owners.axes), x._along, owners)
    spec = x._spec
    x._held, x._owners = values, owners
    x._spec = Spec.make(layout, spec.shape, spec.stride, spec.dtype, spec.device)


def whole_of(x: Any, axes: tuple[int, ...], operator: str, operand: str) -> tuple[Tensor, Layout | None]:
    """An operand that has no rows, whole along the axes that divide them."""
    if not isinstance(x, DistTensor):
        return x, None
    target = without(x._spec.layout, axes)
    if target is x._spec.layout:
        return x._local, target
    return x._become(target, operator, operand, "whole for rows of any rank", explicit=False), target


def run_small(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on rows that are tensors of their own. Their shapes are this rank's, so other ranks are not told."""
    before, sparse_check.on.here = sparse_check.on.here, False
    try:
        return func(*args, **kwargs)
    finally:
        sparse_check.on.here = before


def layouts_of(call: Call, bound: Bound, layouts: Sequence[Layout]) -> tuple[Layout, ...] | None:
    """How the results of a call lie along the axes that do not divide rows: decided for the whole call, so that all ranks agree.

    A rank that decided by its own rows alone would, with none of them, decide otherwise than the others.
    """
    sized = [[(tuple(t.shape), t.element_size()) for t in given] for given in (call.operands, call.results)]
    kept = [i for i, name in enumerate(call.names) if name in call.schema.written]
    fixed = {0: layouts[0]} if kept else {}
    cost = partial(resharding.seconds, machine=machine.here)
    found = decide(bound, layouts, sized[0], sized[1], cost, fixed, kept, {}, machine.here, dtype_of(call))
    if found is None or any(layout.merged for layout in (*layouts, *found.results)):
        return None  # parts of a merged dim are counted in the whole dim, of which rows are another number
    return found.results


def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank outside the mesh has of any tensor."""
    return torch.empty(0, dtype=dtype, device=device)


def agreed(result: Any, layout: Layout, operator: str) -> Tensor:
    """This rank's part of a small result, which lies as ``layout`` says."""
    if result._spec.layout is layout:
        return result._local
    return result._become(layout, operator, "result", "all ranks' rows lie alike", explicit=False)


def small(values: Tensor, layout: Layout | None, whole: Tensor, dim: int | None) -> Tensor:
    """This rank's rows of what is ``whole`` on one card, as a tensor of its own that lies along other axes as the whole does."""
    if layout is None:
        return values
    shape = [values.shape[d] if d == dim else size for d, size in enumerate(whole.shape)]
    strides_of = whole.stride()
    order = sorted(range(len(shape)), key=lambda d: -strides_of[d])
    step, stride = 1, [1] * len(shape)
    for d in reversed(order):
        stride[d], step = step, step * max(shape[d], 1)
    spec = Spec.make(layout, torch.Size(shape), tuple(stride), values.dtype, values.device)
    # An alias: what is pending along other axes is reduced in a place of its own, or rows would change under their spec.
    return wrap(strides.place(spec)(values).detach(), spec)
