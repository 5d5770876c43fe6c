"""build: one call -> Program. Finds the rule, binds it, decides, plans each operand's move, and applies the hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard import resharding
from onecard.comm import sparse_check
from onecard.comm.groups import check_world
from onecard.comm.state import machine
from onecard.errors import DispatchError, RuleError
from onecard.layout import Layout
from onecard.mesh import ProcessMesh
from onecard.parts import axes_of, is_merged
from onecard.rules.call import Call, Path
from onecard.rules.decide import Decision, decide, factor_of
from onecard.rules.local import Local
from onecard.rules.registry import Row, find
from onecard.rules.rule import Bound, bind
from onecard.tensor.aliasing import memory
from onecard.tensor.buckets import reduce_first
from onecard.tensor.dispatch import fallback
from onecard.tensor.dispatch.program import Program, own_result, placed
from onecard.tensor.dist_tensor import DistTensor, describe
from onecard.tensor.spec import OWN, Spec
from onecard.tensor.watched import Operands


def build(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    """Decide one call.

    Raises:
        DispatchError: operands on two meshes, or a call that cannot keep one-card semantics.
    """
    program = Program(func)
    operands = [t for t in _flat([*args, *kwargs.values()]) if isinstance(t, DistTensor)]
    fallback.refuse_collective(func, operands)
    for operand in operands:
        operand._spec.check_home(changes=False)
    mesh, device = _common_mesh(func, operands)
    coordinate = mesh.coordinate()
    call = Call(func, [_meta(a) for a in args], {k: _meta(v) for k, v in kwargs.items()})
    program.expand = _functional_form(func, call)
    if program.expand is not None:
        return program
    for path, name in zip(call.paths, call.names, strict=True):
        if name in call.schema.written:
            memory.check_writable(_at(path, args, kwargs), call.schema.name)
    row, bound = _rule(call)
    if row is None or bound is None:
        program.expand = fallback.without_rule(func, call)
        return program
    values = [_at(path, args, kwargs) for path in call.paths]
    layouts = [v._spec.layout if isinstance(v, DistTensor) else Layout.replicated(mesh, v.dim()) for v in values]
    if any(layouts[i].pending for i in bound.unread if call.names[i] in call.schema.written):
        # Overwriting every summand would count the new value once a rank.
        program.expand = fallback.copy_back(func)
        return program
    layouts = [layout.reduced() if i in bound.unread else layout for i, layout in enumerate(layouts)]
    if row.instead is not None and cuts_whole(bound, layouts):
        program.expand = row.instead
        return program
    hinted = _hinted(row, call, bound, values)
    decision = _decision(program, call, bound, layouts, hinted)
    if decision is None:
        program.expand = fallback.copy_back(func)
        return program
    bound = decision.bound
    _plan(program, call, bound, layouts, decision, device)
    if row.hint is not None and not hinted:
        _hint(program, call, bound, decision, row.hint)
    _localise(program, call, row, bound, layouts, decision, device, coordinate)
    if sparse_check.on.here and mesh.size > 1:
        named = zip(call.names, call.paths, values, strict=True)
        plain = [(n, p) for i, (n, p, v) in enumerate(named) if i not in bound.unread and not isinstance(v, DistTensor)]
        program.plain = Operands(program.name, plain, mesh) if plain else None
    if program.view:
        _share(program, call, values[0])
    _shorten(program, call, len(args))
    return program


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
        return row, _bind(row, call)
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


def _decision(
    program: Program, call: Call, bound: Bound, layouts: Sequence[Layout], hinted: dict[int, int]
) -> Decision | None:
    """Decide, with what the operator writes to kept where it lies."""
    aliases = _aliases(call)
    program.aliases = aliases if any(aliases) else ()
    kept = [i for i, name in enumerate(call.names) if name in call.schema.written]
    program.writes, program.combines = tuple(call.paths[i] for i in kept), len(call.operands) > 1
    return decide(
        bound,
        layouts,
        [(tuple(t.shape), t.element_size()) for t in call.operands],
        [(tuple(t.shape), t.element_size()) for t in call.results],
        partial(resharding.seconds, machine=machine.here),
        {i: layouts[call.paths.index(path)] for i, path in enumerate(aliases) if path is not None},
        kept,
        hinted,
        machine.here,
    )


def _plan(
    program: Program, call: Call, bound: Bound, layouts: Sequence[Layout], decision: Decision, device: torch.device
) -> None:
    """Which operands move where, and what the results are."""
    program.reason = decision.reason()
    program.specs = tuple(
        Spec.like(layout, t, device) for layout, t in zip(decision.results, call.results, strict=True)
    )
    program.frame = _frame(call, not program.specs or program.specs[0].here)
    operands = list(zip(call.paths, layouts, decision.operands, call.names, strict=True))
    program.moves = tuple(
        (path, target, name)
        for i, (path, layout, target, name) in enumerate(operands)
        if layout is not target and i not in bound.unread
    )
    # Where the operand is only reduced, that happens in place, and the view is one of it.
    program.copies = call.schema.views and any(layouts[0].reduced() is not target for _, target, _ in program.moves)
    if program.moves:
        program.pending = tuple(
            (path, layout) for path, layout, target, _ in operands if layout.pending and layout is target
        )
    reduced = [p for p, layout, target, _ in operands if p[1] >= 0 and layout.pending and layout.reduced() is target]
    if len(reduced) > 1:  # of one list, as in torch.stack: one message rather than one for each
        program.expand = reduce_first(program.func, reduced, program.name)


def _hint(program: Program, call: Call, bound: Bound, decision: Decision, hint: tuple[str, str]) -> None:
    """What to hint on an operand for the backward operator."""
    operand, factors = call.index(hint[0]), bound.factors(hint[1])
    axes = tuple(axis for axis, use in enumerate(decision.uses) if use.factor in factors)
    program.hint = (call.paths[operand], axes) if axes else None


def _frame(call: Call, here: bool) -> tuple[Any, ...]:
    """The results of an operator of which some are no tensors, with True for each that is; () where nothing has to be said."""
    if len(call.results) >= len(call.func._schema.returns):
        return ()
    if "output_mask" in call.values:  # convolution_backward gives some that nobody asked for
        return tuple(wanted or None for wanted in call.output_mask)
    args, kwargs = call.given
    return () if here else tuple(True if isinstance(r, Tensor) else r for r in call.func(*args, **kwargs))


def _localise(
    program: Program,
    call: Call,
    row: Row,
    bound: Bound,
    layouts: Sequence[Layout],
    decision: Decision,
    device: torch.device,
    coordinate: tuple[int, ...] | None,
) -> None:
    """Adapt the call to this rank: the row's hook, and stand-ins for operands that are not read."""
    if coordinate is None:
        return
    if row.local is not None:
        local = Local(call, bound, decision, coordinate)
        row.local(local)
        program.call = own_result(local.run) if local.run is not None else program.func
        program.copies = program.copies or (call.schema.views and local.copies)
        order = call.schema.arguments
        program.replace = tuple((order.index(name), name, value) for name, value in local.replace.items())
    program.replace += _stand_ins(call, bound, layouts, decision, coordinate, device)


def _share(program: Program, call: Call, base: DistTensor) -> None:
    """Whether a view's result shares memory that must know of it, or is a copy that stands for a view."""
    pending = any(spec.layout.pending for spec in program.specs)
    if pending and not program.copies and not memory.covers(call.func, base, call.results):
        program.copies, program.call = True, _cloned(program.call)
    if program.copies:
        program.call = placed(program.call, program.specs)
    program.shares = not program.copies and (pending or base._spec.alias != OWN)


def _cloned(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*local: Any, **keywords: Any) -> Any:
        made = run(*local, **keywords)
        return made.clone() if isinstance(made, Tensor) else [part.clone() for part in made]

    return call


def _shorten(program: Program, call: Call, given: int) -> None:
    """Mark the program ``simple`` if dispatch itself can run it: local tensors in, one new tensor out."""
    returns = program.func._schema.returns
    if len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType) or len(program.specs) != 1:
        return
    program.spec = program.specs[0]
    program.swaps = tuple((at, value) for at, _, value in program.replace)
    busy = (
        program.plain
        or program.moves
        or program.aliases
        or program.writes
        or program.hint
        or program.shares
        or program.copies
    )
    plain = all(index < 0 and isinstance(place, int) for place, index in call.paths)
    in_place = all(at < given for at, _, _ in program.replace)
    program.simple = bool(not busy and plain and in_place and program.spec.here)


def _stand_ins(
    call: Call,
    bound: Bound,
    layouts: Sequence[Layout],
    decision: Decision,
    coordinate: Sequence[int],
    device: torch.device,
) -> tuple[tuple[int, str, Any], ...]:
    """For an operand that is not read and does not lie as the rule wants it: a tensor of that shape, and no message."""
    made = []
    for i in bound.unread:
        place, index = call.paths[i]
        whole, target = call.operands[i], decision.operands[i]
        if layouts[i] is not target and index < 0:
            one = torch.empty(1, dtype=whole.dtype, device=device)
            value = one.expand(target.local_shape(tuple(whole.shape), coordinate))
            position = place if isinstance(place, int) else call.schema.arguments.index(place)
            made.append((position, call.names[i], value))
    return tuple(made)


def _bind(row: Row, call: Call) -> Bound | None:
    """The row's rule bound to this call; None if the row has no rule for it, or the rule does not fit."""
    form = row.form_for(call)
    if form is None:
        return None
    try:
        operands, results = ([tuple(t.shape) for t in tensors] for tensors in (call.operands, call.results))
        return bind(form, call.names, operands, results, row.pieces)
    except RuleError:
        return None


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
    """For each result tensor the argument that it is, for operators that write to their arguments."""
    written = {}
    for argument in call.func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[frozenset(argument.alias_info.before_set)] = argument.name
    aliases: list[Path | None] = []
    for result in call.func._schema.returns:
        info = result.alias_info
        name = written.get(frozenset(info.before_set)) if info is not None and info.is_write else None
        aliases.append(call.paths[call.names.index(name)] if name is not None else None)
    if len(aliases) != len(call.results):
        return (None,) * len(call.results)
    return tuple(aliases)


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


def _meta(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value._spec.meta()
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _at(path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place, index = path
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value if index < 0 else value[index]
