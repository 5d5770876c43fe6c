"""The way in: every operator that reaches a DistTensor, below autograd. A cache look-up, then local work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard.comm.agree import check
from onecard.comm.base import record
from onecard.comm.base.state import Kept, faked
from onecard.comm.base.warned import warn
from onecard.comm.issue import trace
from onecard.errors import DispatchError
from onecard.recorded import unrecorded
from onecard.rules.call import schema_of
from onecard.rules.register import changed, unproved
from onecard.rules.registry import find, row_name
from onecard.tensor.dispatch import failed
from onecard.tensor.dispatch.build import build
from onecard.tensor.dispatch.entries import builders
from onecard.tensor.dispatch.first_calls import FirstCalls, believed
from onecard.tensor.dispatch.program import Compared, FirstRun, Program, Rewritten
from onecard.tensor.dispatch.recent import Recent
from onecard.tensor.dist_tensor import DistTensor, copies_claim, has_copies
from onecard.tensor.same_numbers import claims_of, numbers_of
from onecard.tensor.spec import STALE

programs: Kept[Recent] = Kept(Recent)
divided: Kept[set[str]] = Kept(set)
"""Names of the axes along which an operand of some operator was cut, or pending."""
by_value: dict[Any, bool] = {}


def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run one operator on distributed (and plain) tensors.

    The cache key holds the specs of tensors and the static arguments; floating-point arguments only where the operator's
    rule depends on their value, so that a learning rate that changes each step does not miss.
    """
    key: list[Any] = [func]
    local = []
    for a in args:
        kind = type(a)
        if kind is DistTensor:
            key.append(a._spec)
            local.append(a._local)
        elif kind is int or a is None:
            key.append(a)
            local.append(a)
        else:
            key.append(freeze(a, func))
            local.append(a)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            key.append(freeze(a, func))
    program = programs.here.get(tuple(key))
    if program is not None and program.simple:
        for position, value in program.swaps:
            local[position] = value
        try:
            result = program.call(*local, **kwargs) if kwargs else program.call(*local)
        except (RuntimeError, IndexError) as fault:
            failed.note(fault, func, args, kwargs or {})
            raise
        return program.wrap(result, program.spec)
    try:
        if program is None:
            program = _miss(tuple(key), func, args, kwargs or {})
        return program(args, kwargs or {})
    except (RuntimeError, IndexError) as fault:
        failed.note(fault, func, args, kwargs or {})
        raise


def _miss(key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> Any:
    older = programs.here.recall(key)
    if older is not None:
        return older
    given = [x for v in (*args, *kwargs.values()) for x in (v if isinstance(v, list | tuple) else (v,))]
    for layout in {v._spec.layout for v in given if isinstance(v, DistTensor)}:
        names = zip(layout.mesh.dim_names, layout.placements, strict=True)
        divided.here.update(name for name, where in names if not where.is_replicate())
    stale = [v for v in given if isinstance(v, DistTensor) and v._spec.alias == STALE]
    if stale:
        for value in stale:
            value._refresh()
        return program_for(func, args, kwargs)
    with unrecorded():
        program = builders.get(func, build)(func, args, kwargs)
    known = faked.here or not trace.faking()  # what is decided under a tracer may hold tensors without data
    keep = partial(programs.here.keep, key) if known else _forget
    numbers = None if isinstance(program, Rewritten) else numbers_of(func, args, kwargs)
    if numbers is not None and isinstance(program, Program) and not program.replace:
        program, numbers = replace(program, call=numbers.ahead_of(program.call)), None
    if unproved and isinstance(program, Program | Rewritten) and believed(func):
        program = FirstCalls(program)
    elif isinstance(program, Program):
        program = FirstRun(program, keep if numbers is None else lambda p: keep(Compared(p, numbers)))
    if numbers is not None:
        program = Compared(program, numbers)
    keep(program)
    return program


def _forget(program: Any) -> None:
    """In the place of keeping a program that is for one call."""


def program_for(func: Any, args: Any, kwargs: Any) -> Any:
    """The cached program of a call; one that never ran by itself, as an element of a list, is known before its first run."""
    key = (func, *(freeze(a, func) for a in args), *(x for n, a in kwargs.items() for x in (n, freeze(a, func))))
    program = programs.here.get(key) or _miss(key, func, args, kwargs)
    program = program.program if type(program) is Compared else program
    return program.program if type(program) is FirstRun else program


def freeze(value: Any, func: Any) -> Any:
    """What of an argument decides: hashable, and different for 1, 1.0 and True."""
    kind = type(value)
    if kind is DistTensor:
        return value._spec
    if kind is float or kind is complex:
        return (kind, value) if _matters(func) else kind
    if kind is bool:
        return (bool, value)
    if kind is list or kind is tuple:
        return tuple([freeze(item, func) for item in value])
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise DispatchError(
                f"{func}: a {str(value.layout).removeprefix('torch.')} tensor cannot meet a DistTensor; pass x.to_dense(), or "
                "the whole of the other one (y.full_tensor()) to compute on every rank"
            )
        return (Tensor, value.shape, value.stride(), value.dtype)
    return value


def _matters(func: Any) -> bool:
    found = by_value.get(func)
    if found is None:
        row = find(func)
        found = by_value[func] = row is not None and row.values
    return found


def _forget_rows() -> None:
    for func in [f for f in by_value if f not in builders]:
        del by_value[func]


def checked(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``dispatch`` under the debug check: ranks must hold equal copies of what is not cut (see ``comm.check``)."""
    schema = schema_of(func)
    given = [*zip(schema.arguments, args, strict=False), *(kwargs or {}).items()]
    values = [(name, v) for name, value in given for v in (value if isinstance(value, list | tuple) else [value])]
    mesh = next((v.mesh for _, v in values if isinstance(v, DistTensor)), None)
    if unproved:
        _tell_unproved(func)
    if mesh is not None and mesh.coordinate() is not None:
        plain = [check.plain(n, v) for n, v in values if isinstance(v, Tensor) and not isinstance(v, DistTensor)]
        # Memory that nobody has written to yet differs: not what an operator only writes, renames or takes the shape of.
        reads = not schema.views and not schema.name.endswith("_like") and not schema.name.startswith("new_")
        read = [(n, v) for n, v in values if isinstance(v, DistTensor) and v.mesh is mesh and n not in schema.written]
        copies = [copies_claim(f"{n!r}{record.name_of(v)}", v) for n, v in read if reads and has_copies(v)]
        written = next((record.name_of(v) for n, v in values if n in schema.written), "")
        check.equal(f"{schema.name}{written}", mesh.process_ids, plain + copies + claims_of(func, args, kwargs or {}))
    return dispatch(cls, func, types, args, kwargs)


def _tell_unproved(func: Any) -> None:
    """Warn once of a rule of the user's that was never proved: if a value is wrong, it is the first suspect."""
    name = row_name(func)
    if name in unproved:
        unproved.discard(name)
        warn(
            f"{name} at {record.user_line()} runs by a rule that was registered without verify=, so that nobody has proved "
            f"it. If a value is wrong, suspect it first: onecard.register_rule({name!r}, ..., verify=[a sample call])",
        )


def _check() -> None:
    DistTensor.__torch_dispatch__ = classmethod(checked)  # type: ignore[assignment]


changed += [lambda: programs.here.forget(), _forget_rows]
DistTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
check.when_on(_check)
