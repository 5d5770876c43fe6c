"""Operators on rows, by the rules that operators have: to hold some rows is to have cut a factor, only not in stretches.

So a rule's factor that may be cut may be cut by rows: operands that have it bring the same rows, others are whole along the
axes that divide rows, results that have it are rows again, and results that lack it are pending sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onecard._torch.names import tree_leaves
from onecard.comm.base.state import Kept
from onecard.errors import OnecardError
from onecard.place.layout import Layout
from onecard.rules.call import Call, schema_of
from onecard.rules.registry import find
from onecard.rules.rule import Bound
from onecard.tensor.aliasing import strides
from onecard.tensor.dispatch import costly
from onecard.tensor.dispatch.build import at_path, meta_of
from onecard.tensor.dispatch.entry import freeze
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.rows.owners import Owners
from onecard.tensor.rows.rows import (
    Rows,
    agreed,
    as_rows,
    by_default,
    layouts_of,
    made,
    nothing,
    run_small,
    shares,
    small,
    whole_of,
    without,
)
from onecard.tensor.rows.single import alone, asked, many
from onecard.tensor.spec import Spec

_SIZES = ("size", "input_sizes", "sizes")  # arguments that are a shape
LIMIT = 4096  # calls that are kept


@dataclass(frozen=True, slots=True)
class ByRows:
    """How a call runs on rows.

    Attributes:
        call: the whole call; ``bound``: its rule.
        dims: for each operand the dim that has the rows' factor, or None; ``results``: likewise.
        sizes: arguments that are shapes: position or keyword, and which of their entries counts the rows.
    """

    call: Call
    bound: Bound
    dims: tuple[int | None, ...]
    results: tuple[int | None, ...]
    sizes: tuple[tuple[int | str, tuple[int, ...], int], ...]


_known: Kept[dict[Any, ByRows | None]] = Kept(dict)


@by_default
def by_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that has a rule on rows; NotImplemented where the rule does not say how."""
    how = _how(func, args, kwargs)
    if how is None or (None in how.results and _at_one_expert(args, kwargs)):
        return alone(func, args, kwargs)
    values = [at_path(path, args, kwargs) for path in how.call.paths]
    if how.call.schema.written and not _writes_rows(how, values):
        return NotImplemented
    owners = _chosen(how, values)
    operands = None if owners is None else _operands(how, values, owners)
    if owners is None or operands is None:
        return NotImplemented
    locals_, layouts = zip(*operands, strict=True)
    apart, lie = any(_busy(layout) for layout in layouts), None
    if apart:
        whole = [layout or Layout.replicated(owners.mesh, t.dim()) for layout, t in zip(layouts, how.call.operands)]  # noqa: B905
        lie = layouts_of(how.call, how.bound, whole)
        if lie is None:
            return NotImplemented
    if not owners.here:
        result = _elsewhere(how.call, owners)
    else:
        if apart:
            pairs = zip(locals_, whole, how.call.operands, how.dims, strict=True)
            locals_ = tuple(small(*pair) for pair in pairs)
        run = run_small if apart else _run
        result = run(func, _filled(how, args, locals_, owners), _named(how, kwargs, locals_, owners))
    if how.call.schema.written:
        return _written(values[0], locals_[0], result, lie)
    return _wrapped(how, result, owners, values, args, lie)


def _elsewhere(call: Call, owners: Owners) -> Any:
    """The results on a rank outside the mesh."""
    rest = iter([nothing(t.dtype, owners.mine.device) for t in call.results])
    if not many(call):
        return next(rest)
    made = [next(rest) if there else None for there in asked(call)]
    return made if call.func._schema.returns[0].type.kind() == "ListType" else tuple(made)


def _at_one_expert(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, Rows) and x._owners.place for x in tree_leaves((args, kwargs)))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _busy(layout: Layout | None) -> bool:
    return layout is not None and not layout.is_replicated


def _how(func: Any, args: Any, kwargs: Any) -> ByRows | None:
    key = (func, *(_key(a, func) for a in args), *((n, _key(a, func)) for n, a in kwargs.items()))
    if key not in _known.here:
        if len(_known.here) >= LIMIT:
            _known.here.clear()
        _known.here[key] = _decided(func, args, kwargs)
    return _known.here[key]


def _key(value: Any, func: Any) -> Any:
    if isinstance(value, Rows):
        return ("rows", value._spec, value._along)
    if isinstance(value, list | tuple):
        return tuple([_key(item, func) for item in value])
    return freeze(value, func)


def _decided(func: Any, args: Any, kwargs: Any) -> ByRows | None:
    row = find(func)
    schema = schema_of(func)
    if row is None or schema.out or schema.effects:
        return None
    call = Call(func, [meta_of(a) for a in args], {k: meta_of(v) for k, v in kwargs.items()})
    try:
        call.results = row.results_of(call)
        bound = row.bound_for(call)
    except (OnecardError, RuntimeError):
        return None
    if bound is None:
        return None
    rows = [(i, at_path(path, args, kwargs)) for i, path in enumerate(call.paths)]
    factors = {bound.operands[i][x._along] for i, x in rows if isinstance(x, Rows)}
    if len(factors) != 1 or len(found := factors.pop()) != 1:
        return None
    factor = found[0]
    if factor not in bound.free or factor in bound.pieces | bound.nonempty | bound.even:
        return None
    dims = [_dim_of(factor, dims) for dims in bound.operands]
    results = [_dim_of(factor, dims) for dims in bound.results]
    if -1 in dims or -1 in results or bound.unread:
        return None
    lost = [r for r, dim in enumerate(results) if dim is None]
    if lost and (any(bound.reduce[r] != "sum" for r in lost) or schema.written or schema.views):
        return None
    if lost and any(all(dims[i] is None for i in term) for term in bound.terms):
        return None  # a summand that would be added once for each rank
    sizes = _sizes(call, results)
    if row.local is not None and not sizes and not row.any_rows:
        return None  # the hook knows of the whole: a mean, or its gradient, divides by all rows, not by this rank's
    return None if sizes is None else ByRows(call, bound, tuple(dims), tuple(results), sizes)


def _dim_of(factor: int, dims: Sequence[tuple[int, ...]]) -> int | None:
    """The dim that is a factor; None if none has it, -1 if one has more than it."""
    having = [d for d, factors in enumerate(dims) if factor in factors]
    if not having:
        return None
    return having[0] if len(having) == 1 and dims[having[0]] == (factor,) else -1


def _sizes(call: Call, results: Sequence[int | None]) -> tuple[tuple[int | str, tuple[int, ...], int], ...] | None:
    """The arguments that are the result's shape."""
    found: list[tuple[int | str, tuple[int, ...], int]] = []
    args, kwargs = call.given
    places: list[int | str] = [*range(len(args)), *kwargs]
    names = [*call.schema.arguments[: len(args)], *kwargs]
    for place, name, value in zip(places, names, (*args, *kwargs.values()), strict=True):
        if name in _SIZES and isinstance(value, list | tuple) and results[0] is not None:
            shape = tuple(call.results[0].shape)
            if len(value) != len(shape):
                return None
            found.append((place, shape, results[0]))
    return tuple(found)


def _writes_rows(how: ByRows, values: Sequence[Any]) -> bool:
    """Whether what is written to is the first operand, rows that nobody shares."""
    first = values[0]
    return how.call.schema.written == (how.call.names[0],) and isinstance(first, Rows) and not shares(first)


def _chosen(how: ByRows, values: Sequence[Any]) -> Owners | None:
    """On which ranks the call runs: where rows have been sent already, else where the largest are (weights of each token)."""
    rows = [x for x in values if isinstance(x, Rows)]
    if how.call.schema.written:
        return rows[0]._owners
    best = max(rows, key=lambda x: (x._owners.moved, len(x._owners.places), x.numel()))
    return best._owners


def _operands(how: ByRows, values: Sequence[Any], owners: Owners) -> list[tuple[Any, Layout | None]] | None:
    found: list[tuple[Any, Layout | None]] = []
    for value, dim, name in zip(values, how.dims, how.call.names, strict=True):
        if dim is None and isinstance(value, Rows):
            return None
        operator = how.call.schema.name
        if dim is None:
            costly.for_rows(value, owners.axes, operator, owners.size)
        one = (
            whole_of(value, owners.axes, operator, name) if dim is None else as_rows(value, dim, owners, operator, name)
        )
        if one is None:
            return None
        found.append(one)
    return found


def _filled(how: ByRows, args: Any, locals_: Sequence[Any], owners: Owners) -> list[Any]:
    """The positional arguments on this rank."""
    filled = [list(a) if isinstance(a, list | tuple) else a for a in args]
    for (place, index), value in zip(how.call.paths, locals_, strict=True):
        if isinstance(place, int):
            _put(filled, place, index, value)
    for place, shape, dim in how.sizes:
        if isinstance(place, int):
            filled[place] = _sized(shape, dim, owners)
    return filled


def _named(how: ByRows, kwargs: Any, locals_: Sequence[Any], owners: Owners) -> dict[str, Any]:
    filled = dict(kwargs)
    for (place, index), value in zip(how.call.paths, locals_, strict=True):
        if isinstance(place, str):
            _put(filled, place, index, value)
    for place, shape, dim in how.sizes:
        if isinstance(place, str):
            filled[place] = _sized(shape, dim, owners)
    return filled


def _put(holder: Any, place: Any, index: int, value: Any) -> None:
    if index < 0:
        holder[place] = value
    else:
        holder[place][index] = value


def _sized(shape: tuple[int, ...], dim: int, owners: Owners) -> list[int]:
    return [len(owners.mine) if d == dim else n for d, n in enumerate(shape)]


def _written(target: Rows, given: Any, result: Any, lie: tuple[Layout, ...] | None) -> Rows:
    """An operator has written to rows, in place."""
    one = result if isinstance(result, Tensor) else given
    target._held = agreed(one, lie[0], "write") if lie is not None and target._owners.here else one
    return target


def _wrapped(
    how: ByRows, result: Any, owners: Owners, values: Sequence[Any], args: Any, lie: tuple[Layout, ...] | None
) -> Any:
    """The results with their layouts: rows, or pending sums of them."""
    base = values[0] if how.call.schema.views else None
    listed = result if isinstance(result, list | tuple) else [result]
    wrapped, number = [], 0
    for one in listed:
        if not isinstance(one, Tensor):
            wrapped.append(one)
            continue
        whole, dim = how.call.results[number], how.results[number]
        layout = Layout.replicated(owners.mesh, whole.dim()) if lie is None else lie[number]
        if dim is not None and layout.axes(dim):  # cut along another axis, too
            layout = without(layout, layout.axes(dim))
        local = one if lie is None or not owners.here else agreed(one, layout, how.call.schema.name)
        wrapped.append(_one(local, layout, whole, dim, owners, base, how, args, number if len(listed) > 1 else None))
        number += 1
    return type(result)(wrapped) if isinstance(result, list | tuple) else wrapped[0]


def _one(
    local: Tensor,
    layout: Layout,
    whole: Tensor,
    dim: int | None,
    owners: Owners,
    base: Any,
    how: ByRows,
    args: Any,
    at: Any,
) -> Tensor:
    if dim is None:
        pending = tuple(sorted((*layout.pending, *((a, "sum") for a in owners.axes))))
        spec = Spec.like(Layout.make(layout.mesh, layout.dims, pending), whole, local.device)
        return wrap(strides.place(spec)(local) if owners.here else local, spec)
    rows = made(local, layout, whole, dim, owners, local.device)
    if isinstance(base, Rows):
        rows._view_of = (base, how.call.func, tuple(args[1:]), at)
        base._seen_by = [*(v for v in base._seen_by if v() is not None), weakref.ref(rows)]
    return rows
