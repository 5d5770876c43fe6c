"""build: one call -> Program. Finds the rule, binds it, decides, plans each operand's move, and applies the hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard.comm.agree import sparse_check
from onecard.comm.base.state import machine
from onecard.comm.issue.groups import apart, check_world
from onecard.errors import DispatchError
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import axes_of, is_merged
from onecard.rules.call import Call, Path, dtype_of
from onecard.rules.decide import Decision, decide, factor_of
from onecard.rules.local import Local
from onecard.rules.registry import Row, find
from onecard.rules.rule import Bound
from onecard.tensor.aliasing import memory
from onecard.tensor.buckets import reduce_first
from onecard.tensor.dispatch import costly, fallback
from onecard.tensor.dispatch.program import Move, Program, Rechecked, Replacement, Rewritten, own_result, placed
from onecard.tensor.dist_tensor import DistTensor, describe, wrap, wrap_view
from onecard.tensor.spec import OWN, Spec
from onecard.tensor.watched import Operands


@dataclass(frozen=True, slots=True)
class _Case:
    """A call with the rule that fits it, and its operands as they lie.

    Attributes:
        values: the operands, plain or distributed; ``layouts``: theirs (plain ones are replicated).
        coordinate: of this rank on the mesh; None outside it.
    """

    call: Call
    row: Row
    bound: Bound
    values: tuple[Any, ...]
    layouts: tuple[Layout, ...]
    mesh: ProcessMesh
    device: torch.device
    coordinate: tuple[int, ...] | None


def build(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Program | Rewritten:
    """Decide one call.

    Raises:
        DispatchError: operands on two meshes, or a call that cannot keep one-card semantics.
    """
    operands = [t for t in _flat([*args, *kwargs.values()]) if isinstance(t, DistTensor)]
    fallback.refuse_collective(func, operands)
    for operand in operands:
        operand._spec.check_home(changes=False)
    mesh, device = _common_mesh(func, operands)
    call = Call(func, [meta_of(a) for a in args], {k: meta_of(v) for k, v in kwargs.items()})
    functional = _functional_form(func, call)
    if functional is not None:
        return Rewritten(func, functional)
    for path, name in zip(call.paths, call.names, strict=True):
        if name in call.schema.written:
            memory.check_writable(at_path(path, args, kwargs), call.schema.name)
    row, bound = _rule(call)
    if row is None or bound is None:
        return Rewritten(func, fallback.without_rule(func, call))
    values = tuple(at_path(path, args, kwargs) for path in call.paths)
    layouts = [v._spec.layout if isinstance(v, DistTensor) else Layout.replicated(mesh, v.dim()) for v in values]
    if any(layouts[i].pending for i in bound.unread if call.names[i] in call.schema.written):
        # Overwriting every summand would count the new value once a rank.
        return Rewritten(func, fallback.copy_back(func))
    unread = bound.unread
    seen = tuple(layout.reduced() if i in unread else layout for i, layout in enumerate(layouts))
    return _decided(_Case(call, row, bound, values, seen, mesh, device, mesh.coordinate()), len(args))


def _decided(case: _Case, given: int) -> Program | Rewritten:
    """The program of a call that has a rule; ``given`` of its arguments are positional."""
    call, row = case.call, case.row
    if row.instead is not None and cuts_whole(case.bound, case.layouts):
        return Rewritten(call.func, row.instead)
    hinted = _hinted(row, call, case.bound, case.values)
    aliases = _aliases(call)
    decision = _decision(case, aliases, hinted)
    if decision is None:
        return Rewritten(call.func, fallback.copy_back(call.func))
    if decision.bound is not case.bound:
        case = replace(case, bound=decision.bound)
    together = _reduced_together(case, decision)
    if together:  # of one list, as in torch.stack: one message rather than one for each
        return Rewritten(call.func, reduce_first(call.func, together, call.schema.name))
    return _program(case, decision, aliases, not hinted, given)


def _program(case: _Case, decision: Decision, aliases: tuple[Path | None, ...], may_hint: bool, given: int) -> Program:
    call = case.call
    specs = tuple(Spec.like(layout, t, case.device) for layout, t in zip(decision.results, call.results, strict=True))
    here = not specs or specs[0].here
    moves = _moves(case, decision)
    if moves:
        costly.look(
            call.schema.functional, case.values, [(call.paths.index(path), target) for path, target, _ in moves]
        )
    run, replaced, own = _on_this_rank(case, decision)
    # Where the operand is only reduced, that happens in place, and the view is one of it.
    copies = call.schema.views and (own or any(case.layouts[0].reduced() is not target for _, target, _ in moves))
    run, copies, shares = _shared(case, specs, run, copies) if call.schema.views else (run, copies, False)
    writes = tuple(path for path, name in zip(call.paths, call.names, strict=True) if name in call.schema.written)
    hint = _hint(case, decision) if may_hint else None
    plain = _plain(case)
    busy = bool(moves or aliases or writes or hint or plain or shares or copies)
    fields: dict[str, Any] = dict(
        func=call.func, name=call.schema.name, call=run, wrap=wrap_view if call.schema.views else wrap,
        specs=specs, spec=specs[0] if specs else None, simple=not busy and here and _is_plain(call, specs, replaced, given),
        swaps=tuple((at, value) for at, _, value in replaced), moves=moves, reason=decision.reason(), replace=replaced,
        aliases=aliases, writes=writes, combines=len(call.operands) > 1, copies=copies, shares=shares, hint=hint,
        frame=_frame(call, here), plain=plain, pointwise=torch.Tag.pointwise in call.func.tags,
    )  # fmt: skip
    pending = _stay_pending(case, decision) if moves else ()
    return Rechecked(**fields, pending=pending) if pending else Program(**fields)


def _functional_form(func: Any, call: Call) -> Callable[..., Any] | None:
    """For operators with ``out=``, and those that change a shape in place."""
    if call.schema.out:
        return fallback.out_of_place(func)
    if torch.Tag.inplace_view in func.tags and call.schema.name != "detach_":
        return fallback.shape_in_place(func, call)
    return None


def _rule(call: Call) -> tuple[Row | None, Bound | None]:
    """The row of an operator, bound to the shapes of the call; None where there is none, or no shape without data."""
    row = find(call.func)
    if row is None:
        return None, None
    try:
        call.results = row.results_of(call)
        return row, row.bound_for(call)
    except RuntimeError as fault:
        if not isinstance(fault, NotImplementedError) and torch.Tag.dynamic_output_shape not in call.func.tags:
            raise
        return row, None


def _hinted(row: Row, call: Call, bound: Bound, values: Sequence[Any]) -> dict[int, int]:
    """What the forward operator hinted, if this is its backward: axis -> factor of the result."""
    factor = bound.factor(row.hint[1]) if row.hint is not None else None
    if row.hint is None or factor is None or any(factor in dim for dims in bound.operands for dim in dims):
        return {}
    carrier = values[call.index(row.hint[0])]
    return dict.fromkeys(carrier._spec.hint, factor) if isinstance(carrier, DistTensor) else {}


def _decision(case: _Case, aliases: Sequence[Path | None], hinted: dict[int, int]) -> Decision | None:
    """Decide, with what the operator writes to kept where it lies."""
    call, layouts = case.call, case.layouts
    return decide(
        case.bound,
        layouts,
        [(tuple(t.shape), t.element_size()) for t in call.operands],
        [(tuple(t.shape), t.element_size()) for t in call.results],
        partial(resharding.seconds, machine=machine.here),
        {i: layouts[call.paths.index(path)] for i, path in enumerate(aliases) if path is not None},
        [i for i, name in enumerate(call.names) if name in call.schema.written or _is_own(case, i)],
        hinted,
        machine.here,
        dtype_of(call),
    )


def _is_own(case: _Case, i: int) -> bool:
    """Whether a plain operand is each rank's own (a loss of its rows), where one rank's may not count for all in a sum."""
    sums = any(op != "avg" for layout in case.layouts for _, op in layout.pending)
    return sums and case.mesh in apart.here and not isinstance(case.values[i], DistTensor)


def _moves(case: _Case, decision: Decision) -> tuple[Move, ...]:
    """Which operands move where."""
    operands = zip(case.call.paths, case.layouts, decision.operands, case.call.names, strict=True)
    return tuple(
        (path, target, name)
        for i, (path, layout, target, name) in enumerate(operands)
        if layout is not target and i not in case.bound.unread
    )


def _stay_pending(case: _Case, decision: Decision) -> tuple[tuple[Path, Layout], ...]:
    """The operands that are pending and not moved."""
    operands = zip(case.call.paths, case.layouts, decision.operands, strict=True)
    return tuple((path, layout) for path, layout, target in operands if layout.pending and layout is target)


def _reduced_together(case: _Case, decision: Decision) -> list[Path]:
    """The tensors of lists that must be reduced, if there are several."""
    operands = zip(case.call.paths, case.layouts, decision.operands, strict=True)
    found = [p for p, layout, target in operands if p[1] >= 0 and layout.pending and layout.reduced() is target]
    return found if len(found) > 1 else []


def _hint(case: _Case, decision: Decision) -> tuple[Path, tuple[int, ...]] | None:
    """What to hint on an operand for the backward operator."""
    if case.row.hint is None:
        return None
    operand, factors = case.call.index(case.row.hint[0]), case.bound.factors(case.row.hint[1])
    axes = tuple(axis for axis, use in enumerate(decision.uses) if use.factor in factors)
    return (case.call.paths[operand], axes) if axes else None


def _plain(case: _Case) -> Operands | None:
    """The plain operands, for the sparse check."""
    if not sparse_check.on.here or case.mesh.size == 1:
        return None
    named = zip(case.call.names, case.call.paths, case.values, strict=True)
    unread = case.bound.unread
    plain = [(n, p) for i, (n, p, v) in enumerate(named) if i not in unread and not isinstance(v, DistTensor)]
    return Operands(case.call.schema.name, plain, case.mesh) if plain else None


def _frame(call: Call, here: bool) -> tuple[Any, ...]:
    """The results of an operator of which some are no tensors, with True for each that is; () where nothing has to be said."""
    if len(call.results) >= len(call.func._schema.returns):
        return ()
    if "output_mask" in call.values:  # convolution_backward gives some that nobody asked for
        return tuple(wanted or None for wanted in call.output_mask)
    args, kwargs = call.given
    return () if here else tuple(True if isinstance(r, Tensor) else r for r in call.func(*args, **kwargs))


def _on_this_rank(case: _Case, decision: Decision) -> tuple[Callable[..., Any], tuple[Replacement, ...], bool]:
    """The call adapted to this rank by the row's hook: what runs, which arguments differ, whether it copies where one card
    has a view."""
    call = case.call
    if case.coordinate is None:
        return call.func, (), False
    standing_in = _stand_ins(case, decision, case.coordinate)
    if case.row.local is None:
        return standing_in(call.func), (), False
    local = Local(call, case.bound, decision, case.coordinate)
    case.row.local(local)
    order = call.schema.arguments
    replaced = tuple((order.index(name), name, value) for name, value in local.replace.items())
    return standing_in(own_result(local.run) if local.run is not None else call.func), replaced, local.copies


def _shared(
    case: _Case, specs: Sequence[Spec], run: Callable[..., Any], copies: bool
) -> tuple[Callable[..., Any], bool, bool]:
    """What runs for a view; whether its result is a copy that stands for a view, or shares memory that must know of it."""
    base, pending = case.values[0], any(spec.layout.pending for spec in specs)
    if pending and not copies and not memory.covers(case.call.func, base, case.call.results):
        run, copies = _cloned(run), True
    if copies:
        return placed(run, specs), True, False
    return run, False, bool(pending or base._spec.alias != OWN)


def _cloned(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*local: Any, **keywords: Any) -> Any:
        made = run(*local, **keywords)
        return made.clone() if isinstance(made, Tensor) else [part.clone() for part in made]

    return call


def _is_plain(call: Call, specs: Sequence[Spec], replaced: Sequence[Replacement], given: int) -> bool:
    """Whether operands stand among the positional arguments, each alone, and one new tensor comes out."""
    returns = call.func._schema.returns
    one = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType) and len(specs) == 1
    alone = all(index < 0 and isinstance(place, int) for place, index in call.paths)
    return one and alone and all(at < given for at, _, _ in replaced)


def _stand_ins(case: _Case, decision: Decision, coordinate: Sequence[int]) -> Callable[[Any], Any]:
    """For an operand that is not read and does not lie as the rule wants it: a tensor of that shape, and no message.

    It is made anew in each call: a recording would not know whence it came.
    """
    call, made = case.call, list[tuple[int, str, torch.dtype, tuple[int, ...]]]()
    for i in case.bound.unread:
        place, index = call.paths[i]
        whole, target = call.operands[i], decision.operands[i]
        if case.layouts[i] is not target and index < 0:
            position = place if isinstance(place, int) else call.schema.arguments.index(place)
            made.append((position, call.names[i], whole.dtype, target.local_shape(tuple(whole.shape), coordinate)))
    if not made:
        return lambda run: run

    def standing_in(run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*local: Any, **keywords: Any) -> Any:
            given = [*local]
            for position, name, dtype, shape in made:
                value = torch.empty(1, dtype=dtype, device=case.device).expand(shape)
                if position < len(given):
                    given[position] = value
                else:
                    keywords[name] = value
            return run(*given, **keywords)

        return called

    return standing_in


def cuts_whole(bound: Bound, layouts: Sequence[Layout]) -> bool:
    """Whether an operand arrives cut along a factor that must be whole."""
    return any(
        (factor_of(factors, dim, axis, bound.sizes, layout.mesh) in whole or is_merged(dim))
        for dims, layout in zip(bound.operands, layouts, strict=True)
        for factors, dim in zip(dims, layout.dims, strict=True)
        if (whole := set(factors) - bound.free)
        for axis in axes_of(dim)
    )


def _aliases(call: Call) -> tuple[Path | None, ...]:
    """For each result tensor the argument that it is, for operators that write to their arguments; () if none is."""
    if not call.schema.written:
        return ()
    written = {}
    for argument in call.func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[frozenset(argument.alias_info.before_set)] = argument.name
    aliases: list[Path | None] = []
    for result in call.func._schema.returns:
        info = result.alias_info
        name = written.get(frozenset(info.before_set)) if info is not None and info.is_write else None
        aliases.append(call.paths[call.names.index(name)] if name is not None else None)
    return tuple(aliases) if len(aliases) == len(call.results) and any(aliases) else ()


def _common_mesh(func: Any, operands: list[DistTensor]) -> tuple[ProcessMesh, torch.device]:
    mesh = operands[0].mesh
    for operand in operands[1:]:
        if operand.mesh is not mesh:
            whole = ", ".join(["Replicate()"] * mesh.ndim)
            raise DispatchError(
                f"{func}: operands live on two meshes, {describe(operands[0])} on {mesh!r} and {describe(operand)} on "
                f"{operand.mesh!r}. Bring them together first, the second one by onecard.reshard(x, {mesh!r}, [{whole}])"
            )
    check_world(mesh)
    return mesh, operands[0]._spec.device


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for v in values for item in (_flat(v) if isinstance(v, list | tuple) else [v])]


def meta_of(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value._spec.meta()
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(meta_of(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def at_path(path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place, index = path
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value if index < 0 else value[index]
