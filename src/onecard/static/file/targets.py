"""What a recording calls, as a name in a file, and back: operators of listed namespaces, and functions of closed tables.

A file's name is compared with names that are there. It is never a path that is followed from object to object.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from onecard import recorded
from onecard._torch.names import OpOverload, OpOverloadPacket, schemas_of
from onecard.comm.issue import again
from onecard.errors import RecordingError
from onecard.static.file.encoding import PYTHON, all_of, one_of, whole
from onecard.static.guards.numbers import MATH
from onecard.static.guards.reads import chosen_by, item

NAMESPACES = frozenset({"aten", "prims"})
"""Of the operators that a file may name unasked; those of others by the caller's leave."""
_OURS: dict[str, Callable[..., Any]] = {
    "item": item,
    "chosen_by": chosen_by,
    "message": again.message,
    "wait": again.wait,
}
_TABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "python": PYTHON,
    "own": _OURS,
    "call": recorded.functions,
    "math": {f.__name__: f for f in MATH},
}

# What an operator of a file may be given. Storages, streams, objects of TorchScript are none of it.
_TYPES = re.compile(
    r"(Optional|List)?\[?(Optional|List)?\[?(Tensor|int|float|bool|number|complex|Device|Generator)\]?\]?"
)
_TEXTS = frozenset({
    "UPLO", "api_name", "approximate", "assert_msg", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord",
    "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side",
})  # fmt: skip
"""Arguments that are words of an operator's own; a message or the name of a file is none."""
_PERATORS = frozenset(f"__{i}{name}__" for i in ("", "i") for name in ("and", "or", "xor", "lshift", "rshift"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNCHECKED = ("_unsafe_index", "_unsafe_masked", "sparse", "nested", "_cslt", "_test_")
"""Parts of names of operators that do not look at what they are given, or that a recording has not: they may end a process."""


def name_of(target: Any) -> str:
    """The name of what a node calls.

    Raises:
        RecordingError: it is nothing that a file names.
    """
    if isinstance(target, OpOverload):
        return f"op {target}"
    if target in recorded.writes and recorded.name_of(target) not in recorded.functions:
        raise RecordingError(
            "rows go where data says (x[index] or a grouped product of a dim that is cut), which a file does not hold: record "
            'the step with to_static(..., without=["rows"]), which sends all rows to all ranks, and save that'
        )
    if target in recorded.writes:
        return f"call {recorded.name_of(target)}"
    found = next((f"{kind} {k}" for kind, table in _TABLES.items() for k, f in table.items() if f is target), None)
    if found is None:
        raise RecordingError(f"{target} is no operator of torch or onecard: this recording cannot be saved")
    return found


def function_of(name: Any, trust: Collection[str] = ()) -> Callable[..., Any]:
    """What a file calls so.

    Raises:
        RecordingError: it is nothing that a file may call.
    """
    kind, _, rest = whole(name, (str,)).partition(" ")
    if kind == "op":
        return _operator(rest, frozenset(trust))
    return one_of(one_of(_TABLES, kind, "kind of function"), rest, "function")


@lru_cache(maxsize=8192)
def _operator(name: str, trust: frozenset[str]) -> OpOverload:
    """``namespace.operator.overload``: its schema is looked up in torch's list of them, not in an object's attributes."""
    parts = name.split(".")
    if len(parts) != 3 or not all(map(_NAME.fullmatch, parts)):
        raise RecordingError(f"{name!r} is no name of an operator")
    space, operator, overload = parts
    if space not in NAMESPACES | trust:
        raise RecordingError(
            f"a recording that calls {name} is not loaded: of operators that are not torch's own, the loader runs those of "
            f'namespaces that you name: load_recording(path, trust=["{space}"])'
        )
    if operator.startswith("__") and operator not in _PERATORS:
        raise RecordingError(f"a recording that calls {name} is not loaded: it is no operator on tensors")
    known = {s.overload_name or "default": s for s in schemas_of(f"{space}::{operator}")}
    if overload not in known:
        raise RecordingError(f"this torch has no operator {name}")
    packet = getattr(getattr(torch.ops, space), operator)  # an operator's names, which torch's list has
    found = getattr(packet, overload) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(found, OpOverload) or str(found._schema) != str(known[overload]):
        raise RecordingError(f"this torch has no operator {name}")
    if space in NAMESPACES and (why := _harms(operator, found)):
        raise RecordingError(f"a recording that calls {name} is not loaded: {why}")
    return found


def _harms(name: str, operator: OpOverload) -> str:
    """Why a file may not call an operator of torch; "" if it may."""
    if any(part in name for part in _UNCHECKED):
        return "it does not check what it is given"
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind in ("str", "Optional[str]"):
            if argument.name not in _TEXTS:
                return f"it takes a text, {argument.name}: it reads or writes files, or prints"
        elif not _TYPES.fullmatch(kind):
            return f"it takes {argument.name}, a {kind}"
    return ""


def check_call(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Whether a call has the arguments that a function takes, by their names.

    Raises:
        RecordingError: it has others.
    """
    if isinstance(function, OpOverload):
        declared = function._schema.arguments
        positional = [a for a in declared if not a.kwarg_only]
        given = {a.name for a in positional[: len(args)]}
        missing = {a.name for a in declared if not a.has_default_value()} - given - {*kwargs}
        fits = len(args) <= len(positional) and not missing and {*kwargs} <= {a.name for a in declared} - given
    elif function is again.message:
        fits = _sends(args, kwargs)
    else:
        fits = _binds(function, args, kwargs)
    if not fits:
        raise RecordingError(f"{name} is given {len(args)} arguments and {sorted(kwargs)}, which it does not take")


def _binds(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _sends(args: Any, kwargs: Any) -> bool:
    """Of a message: two tensors, a collective, what it is given besides, and along which line."""
    if len(args) != 5 or not {*kwargs} <= {"later"} or type(kwargs.get("later", False)) is not bool:
        return False
    into, given, collective, rest, line = args
    known = type(collective) is str and collective in again.COLLECTIVES
    nodes = isinstance(into, fx.Node) and isinstance(given, fx.Node)
    if not known or not nodes or type(line) is not again.Line or type(rest) is not tuple:
        return False
    for value in rest:
        if isinstance(value, list | tuple):
            all_of(value, int)
        else:
            whole(value, (int, str))
    return again.takes(collective, rest)
