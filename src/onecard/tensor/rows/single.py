"""One expert of a stack, ``weights[e]`` of a parameter whose experts are cut: it stays on its rank, and its tokens come there.

So a loop over experts sends each expert's tokens to its rank and their results back, as grouped products do, and no weights.
What is computed of one expert is rows that all lie on one rank (``Owners.place``). Operators that no rule can run on rows of
two kinds (tokens by the expert's rows of weights) run on that rank alone, on all of what they need.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.errors import OnecardError
from onecard.place.layout import Layout
from onecard.place.parts import axes_of, is_merged
from onecard.recorded import unrecorded
from onecard.rules.call import Call, schema_of
from onecard.rules.registry import find
from onecard.rules.rule import Bound
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch import costly
from onecard.tensor.dispatch.build import at_path, build, meta_of
from onecard.tensor.dispatch.entries import program
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.rows.owners import Owners, can_move, of_dim
from onecard.tensor.rows.rows import (
    Rows,
    agreed,
    as_rows,
    knows,
    layouts_of,
    made,
    nothing,
    ordinary,
    run_small,
    small,
    unknown,
    whole_of,
    without,
)
from onecard.tensor.spec import Spec

aten = torch.ops.aten


# ---- Taking an expert from the stack, and its gradient back into it


class _Select:
    """``x[e]`` of a dim that is cut: of a parameter, what lies on the expert's rank; else as the rules say."""

    simple = False

    def __init__(self, func: Any) -> None:
        self.func = func
        self.ordinary: Any = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        x, _, index = args
        rows = getattr(x, "_is_param", False) and not (_unknown() or ordinary.here or torch.is_inference_mode_enabled())
        made = _expert(x, index) if rows else None
        if made is not None:
            return made
        if self.ordinary is None:
            with unrecorded():
                self.ordinary = build(self.func, args, kwargs)
        return self.ordinary(args, kwargs)


def _unknown() -> bool:
    """Tokens of one expert are of a size that is data: a loop over experts cannot be recorded."""
    return unknown() or recorded.recorder is not None


@program(aten.select.int)
def _decide(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, *rest = args
    if kwargs or len(rest) != 1 or not isinstance(x, DistTensor) or x.dim() < 2 or dim % x.dim():
        return build(func, args, kwargs)
    layout = x._spec.layout
    cut = layout.dims[0]
    divided = not is_merged(cut) and any(layout.mesh.shape[a] > 1 for a in axes_of(cut))
    ordered = not layout.pending and not layout.merged
    return _Select(func) if divided and ordered else build(func, args, kwargs)


def _expert(x: Any, index: int) -> Rows | None:
    spec, layout = x._spec, x._spec.layout
    size = spec.shape[0]
    index = index + size if index < 0 else index
    others = layout.dims[1:]
    along = next((d for d, axes in enumerate(others) if not axes and spec.shape[d + 1]), None)
    if along is None or not 0 <= index < size:
        return None
    x._refresh()
    mesh = layout.mesh
    place = {axis: int(p[index]) for axis, p in of_dim(mesh, size, layout.dims[0], torch.device("cpu")).places.items()}
    owners = at(mesh, spec.shape[1 + along], place, (spec.shape[1 + along], ()), layout.dims[0], x._local.device)
    if len(owners.mine):
        first, _ = layout.bounds(tuple(spec.shape), 0, mesh.coordinate() or ())
        held = x._local.select(0, index - first)
    elif not owners.here:
        held = x._local
    else:
        held = x._local.new_empty([0 if d == along else n for d, n in enumerate(x._local.shape[1:])])
    whole = torch.empty_strided(spec.shape[1:], spec.stride[1:], dtype=spec.dtype, device="meta")
    found = made(held, Layout.make(mesh, others), whole, along, owners, spec.device)
    found._view_of = (x, aten.select.int, (0, index), None)
    return found


def at(mesh: Any, size: int, place: dict[int, int], home: Any, experts: Any, device: torch.device) -> Owners:
    """The owners of rows that all are at one place."""
    places = {axis: torch.full((size,), c, device=device) for axis, c in place.items()}
    found = Owners(mesh, size, places, home, experts, device)
    found.place = place
    return found


@knows(aten.select_backward.default)
def _into_stack(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of a stack of which one expert was taken: on that expert's rank, beside zeros."""
    grad, shape, dim, index = args
    if not isinstance(grad, Rows) or dim != 0 or not grad._owners.place or grad._owners.extra:
        return NotImplemented
    owners = grad._owners
    cut, mesh = owners.experts, owners.mesh
    index = index + shape[0] if index < 0 else index
    places = of_dim(mesh, shape[0], cut, torch.device("cpu")).places
    if {axis: int(p[index]) for axis, p in places.items()} != owners.place:
        return NotImplemented
    bare = tuple(p for p in grad._spec.layout.pending if p[0] not in places)
    layout = Layout.make(mesh, (cut, *grad._spec.layout.dims), bare)
    like = torch.empty(torch.Size(shape), dtype=grad.dtype, device="meta")
    spec = Spec.like(layout, like, grad.device)
    if not owners.here:
        return wrap(nothing(grad.dtype, grad.device), spec)
    first, count = layout.bounds(tuple(shape), 0, mesh.coordinate() or ())
    part = list(grad._held.shape)
    part[grad._along] = grad.shape[grad._along]
    total = grad._held.new_zeros(count, *part)
    if len(owners.mine):
        total[index - first] = grad._held
    return wrap(strides.place(spec)(total), spec)


# ---- What meets an expert


def alone(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the rank of the one expert that is among its operands; NotImplemented where there is none."""
    row, schema = find(func), schema_of(func)
    if row is None or schema.out or schema.effects or schema.written:
        return NotImplemented
    call = Call(func, [meta_of(a) for a in args], {k: meta_of(v) for k, v in kwargs.items()})
    values = [at_path(path, args, kwargs) for path in call.paths]
    rows = [(i, x) for i, x in enumerate(values) if isinstance(x, Rows)]
    first = next((x._owners for _, x in rows if x._owners.place), None)
    if first is None or any(x._owners.place not in (None, first.place) for _, x in rows):
        return NotImplemented
    try:
        call.results = row.results_of(call)
        bound = row.bound_for(call)
    except (OnecardError, RuntimeError):
        return NotImplemented
    if bound is None or bound.unread or not call.results or any(t.dim() == 0 for t in call.results):
        return NotImplemented
    if sum(asked(call)) != len(call.results):
        return NotImplemented
    how = _Alone(call, bound, first, rows)
    return how.run(func, args, kwargs, values, row.local is not None)


class _Alone:
    """A call on the rank of one expert.

    Attributes:
        place: of the expert; ``tokens``: who has the tokens that meet it; ``factor``: of the tokens, and ``kept`` whether axes
            other than the experts' divide them, too.
    """

    def __init__(self, call: Call, bound: Bound, first: Owners, rows: list[tuple[int, Rows]]) -> None:
        self.call, self.bound, self.first = call, bound, first
        self.place: dict[int, int] = first.place or {}
        self.tokens: Owners | None = None
        factors = set()
        for i, x in rows:
            if x._owners.place is None or x._owners.extra or x._owners.home[1]:
                factors.add(bound.operands[i][x._along])
                best = self.tokens is None or (x._owners.place is not None and self.tokens.place is None)
                self.tokens = x._owners if best else self.tokens
        self.factor = factors.pop() if len(factors) == 1 else None
        self.fits = self.tokens is None or (self.factor is not None and len(self.factor) == 1)
        if self.tokens is not None:
            self.tokens = self._at_expert(self.tokens)
            self.fits &= all(
                can_move(x._owners, self.tokens) for i, x in rows if self._dim(bound.operands[i]) is not None
            )

    def _at_expert(self, tokens: Owners) -> Owners:
        if tokens.place is not None:
            return tokens
        here = at(tokens.mesh, tokens.size, self.place, tokens.home, self.first.experts, tokens.mine.device)
        found = Owners(tokens.mesh, tokens.size, tokens.places | here.places, tokens.home, self.first.experts)
        found.place = self.place
        return found

    def _dim(self, dims: Sequence[tuple[int, ...]]) -> int | None:
        return next((d for d, factors in enumerate(dims) if self.factor and factors == self.factor), None)

    def run(self, func: Any, args: Any, kwargs: Any, values: list[Any], hook: bool) -> Any:
        call, bound = self.call, self.bound
        extra = self.tokens.extra if self.tokens is not None else ()
        if not self.fits or (extra and not self._divides(hook)):
            return NotImplemented
        found = [self._operand(x, i) for i, x in enumerate(values)]
        if any(f is None for f in found):
            return NotImplemented
        mesh = self.first.mesh
        dims = [self._dim(d) if self.tokens is not None else None for d in bound.operands]
        whole = [lay or Layout.replicated(mesh, x.dim()) for (x, lay), x in zip(found, values, strict=True)]  # type: ignore[misc]
        busy = any(not lay.is_replicated for lay in whole)
        lie: Any = layouts_of(call, bound, whole) if busy else [Layout.replicated(mesh, t.dim()) for t in call.results]
        if lie is None:
            return NotImplemented
        results: Any = None
        if self._here():
            locals_ = [f[0] for f in found]  # type: ignore[index]
            if busy:
                locals_ = [small(*p) for p in zip(locals_, whole, call.operands, dims, strict=True)]
            given, named = _filled(call, args, kwargs, locals_)
            results = run_small(func, given, named) if busy else func(*given, **named)
        return self._wrapped(func, args, kwargs, values, results, lie, busy)

    def _divides(self, hook: bool) -> bool:
        """Whether tokens may also be divided among other ranks that have this expert: as the rules let rows be cut."""
        bound, factor = self.bound, (self.factor or (-1,))[0]
        if hook or factor not in bound.free or factor in bound.pieces | bound.nonempty | bound.even:
            return False
        lost = [r for r, dims in enumerate(bound.results) if self._dim(dims) is None]
        having = [self._dim(dims) is not None for dims in bound.operands]
        twice = any(not any(having[i] for i in term) for term in bound.terms)
        return not lost or (all(bound.reduce[r] == "sum" for r in lost) and not twice and not self.call.schema.views)

    def _here(self) -> bool:
        coordinate = self.first.mesh.coordinate()
        return coordinate is not None and all(coordinate[axis] == c for axis, c in self.place.items())

    def _operand(self, x: Any, i: int) -> tuple[Tensor, Layout | None] | None:
        operator, name = self.call.schema.name, self.call.names[i]
        dim = self._dim(self.bound.operands[i]) if self.tokens is not None else None
        if self.tokens is not None and dim is not None and (isinstance(x, Rows) or self.tokens.extra):
            return as_rows(x, dim, self.tokens, operator, name)
        if isinstance(x, Rows):
            rest = _rest(x)
            if x._owners.place is None or x._owners.extra:
                return None
            if self._divided(rest):
                costly.expert(x._view_of[0] if x._view_of is not None else x, operator)
                return None
            return x._held, rest
        axes = self.tokens.axes if self.tokens is not None else tuple(self.place)
        return whole_of(x, axes, operator, name)

    def _divided(self, expert: Layout) -> bool:
        """Whether an expert is cut, or waits for a sum, along an axis that divides its tokens: each rank would need all of it."""
        extra = self.tokens.extra if self.tokens is not None else ()
        used = {a for dim in expert.dims for a in axes_of(dim)} | {a for a, _ in expert.pending}
        return not used.isdisjoint(extra)

    def _wrapped(self, func: Any, args: Any, kwargs: Any, values: Any, results: Any, lie: Any, busy: bool) -> Any:
        call = self.call
        single = not many(call)
        listed = [results] if single else [*(results if results is not None else [None] * len(call.results))]
        given = [r for r in listed if r is not None] or [None] * len(call.results)
        base = values[0] if call.schema.views and isinstance(values[0], Rows) else None
        wrapped: list[Any] = []
        for number, (local, whole, layout) in enumerate(zip(given, call.results, lie, strict=True)):
            if self.tokens is None or self._dim(self.bound.results[number]) is None:
                layout = _with_a_dim(layout)
            if local is not None and busy:
                local = agreed(local, layout, call.schema.name)
            rows = self._one(local, whole, layout, self.bound.results[number])
            if base is not None:
                rows._view_of = (base, func, tuple(args[1:]), None if single else number)
                base._seen_by = [*(v for v in base._seen_by if v() is not None), weakref.ref(rows)]
            wrapped.append(rows)
        if single:
            return wrapped[0]
        if func._schema.returns[0].type.kind() == "ListType":
            return wrapped
        rest = iter(wrapped)
        return tuple(next(rest) if there else None for there in asked(call))

    def _one(self, local: Any, whole: Tensor, layout: Layout, factors: Any) -> Rows:
        """A result: rows of tokens, or something of one expert, a pending sum over ranks that have other tokens of it."""
        device, mesh = self.first.mine.device, self.first.mesh
        dim = self._dim(factors) if self.tokens is not None else None
        if self.tokens is not None and dim is not None:
            owners, along = self.tokens, dim
        else:
            along = next((d for d, axes in enumerate(layout.dims) if not axes), 0)
            size = whole.shape[along]
            owners = at(mesh, size, self.place, (size, ()), self.first.experts, device)
            extra = self.tokens.extra if self.tokens is not None else ()
            layout = Layout.make(mesh, layout.dims, tuple(sorted((*layout.pending, *((a, "sum") for a in extra)))))
        if local is None:
            shape = list(layout.local_shape(tuple(whole.shape)))
            shape[along] = 0
            local = torch.empty(shape, dtype=whole.dtype, device=device)
        return made(local, layout, whole, along, owners, device)


def _with_a_dim(layout: Layout) -> Layout:
    """A layout with a dim that is whole, along which all of it can be rows of one place."""
    return layout if not layout.dims or () in layout.dims else without(layout, layout.axes(0))


def _rest(x: Rows) -> Layout:
    """How an expert lies along axes other than those of its place."""
    layout, axes = x._spec.layout, x._owners.axes
    return Layout.make(layout.mesh, layout.dims, tuple(p for p in layout.pending if p[0] not in axes))


def many(call: Call) -> bool:
    returns = call.func._schema.returns
    return len(returns) != 1 or returns[0].type.kind() == "ListType"


def asked(call: Call) -> Sequence[bool]:
    """Which of several results a call gives."""
    returns, given = call.func._schema.returns, len(call.results)
    if len(returns) == given or returns[0].type.kind() == "ListType":
        return [True] * given
    return call.values.get("output_mask", ())


def _filled(call: Call, args: Any, kwargs: Any, locals_: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    given: Any = [list(a) if isinstance(a, list | tuple) else a for a in args]
    named: Any = dict(kwargs)
    for (place, index), value in zip(call.paths, locals_, strict=True):
        holder = given if isinstance(place, int) else named
        if index < 0:
            holder[place] = value
        else:
            holder[place][index] = value
    return given, named
