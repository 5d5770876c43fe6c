"""Values of a recording as JSON, and back: what JSON has not is a dict with one entry, its kind, which is one of a table."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from onecard.comm.issue import again
from onecard.errors import RecordingError
from onecard.moves.transfer import Transfer, plan_transfer
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Part
from onecard.place.reductions import REDUCTION
from onecard.random import Key, Law, law
from onecard.static.step.step import Effect, Input, Output
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import COPY, OWN, STALE, WINDOWS, Spec

PYTHON: dict[str, Callable[..., Any]] = {f.__name__: f for f in (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.neg,
    operator.pos, operator.abs, operator.getitem, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)}  # fmt: skip
_KINDS = {"DistTensor": DistTensor, "Tensor": torch.Tensor, "float": float, "int": int, "bool": bool, "str": str,
          "NoneType": type(None)}  # fmt: skip
_LARGEST = 2**64
Nodes = dict[str, fx.Node]


def encode(value: Any) -> Any:
    """A value as JSON.

    Raises:
        RecordingError: it is of a kind that no file holds.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is list:
        return [encode(v) for v in value]
    if type(value) is dict:
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    for name, (kind, put, _) in _VALUES.items():
        if type(value) is kind:
            return {name: put(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if callable(value) and value in PYTHON.values():
        return {"function": value.__name__}
    if isinstance(value, type) and value in _KINDS.values():
        return {"type": next(k for k, v in _KINDS.items() if v is value)}
    raise RecordingError(
        f"a recording that holds {value!r} cannot be saved: pass tensors and numbers as arguments, objects by closure"
    )


def decode(value: Any, nodes: Nodes) -> Any:
    """What ``encode`` has encoded.

    Raises:
        RecordingError: it is nothing that ``encode`` gives.
    """
    if type(value) is list:
        return [decode(v, nodes) for v in value]
    if type(value) is not dict:
        return whole(value, (type(None), bool, int, str))
    ((name, held),) = whole(value, (dict,), 1).items()
    if name == "dict":
        return {decode(k, nodes): decode(v, nodes) for k, v in whole(held, (list,))}
    if name == "node":
        return one_of(nodes, held, "node")
    if name == "function":
        return one_of(PYTHON, held, "function")
    if name == "type":
        return one_of(_KINDS, held, "type")
    return one_of(_VALUES, name, "kind of value")[2](held, lambda v: decode(v, nodes))


def whole(value: Any, kinds: tuple[type, ...], length: int | None = None) -> Any:
    """A value, if it is exactly of one of these types (and so long).

    Raises:
        RecordingError: it is not.
    """
    if type(value) not in kinds or (length is not None and len(value) != length):
        raise RecordingError(f"{str(value)[:80]!r} stands where {' or '.join(k.__name__ for k in kinds)} belongs")
    if type(value) is int and abs(value) > _LARGEST:
        raise RecordingError(f"{value} is no number of a recording")
    return value


def one_of(table: Any, name: Any, what: str) -> Any:
    """What a table has under a name.

    Raises:
        RecordingError: it has nothing there.
    """
    if whole(name, (str,)) not in table:
        raise RecordingError(f"there is no {what} {name!r} that a file may name")
    return table[name]


# -- the kinds -------------------------------------------------------------------------------------------------------------


def all_of(value: Any, *kinds: type) -> Any:
    """A list or tuple of values of these types."""
    for v in whole(value, (list, tuple, torch.Size)):
        whole(v, kinds)
    return value


def _of(kind: type) -> tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """A dataclass by its fields."""
    names = [f.name for f in fields(kind)]

    def made(held: Any, of: Any) -> Any:
        return kind(*map(of, whole(held, (list,), len(names))))

    return kind, lambda v: [encode(getattr(v, n)) for n in names], made


def _torchs(kind: type) -> tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """One of torch's constants, by its name."""
    table = {k: v for k, v in vars(torch).items() if type(v) is kind}
    return kind, lambda v: str(v).removeprefix("torch."), lambda held, of: one_of(table, held, kind.__name__)


def _many(*parts: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], list[Any]]]:
    return lambda v: [encode(getattr(v, p)) for p in parts], lambda held, of: [
        *map(of, whole(held, (list,), len(parts)))
    ]


def _mesh(held: Any, of: Any) -> ProcessMesh:
    ranks, names = whole(held, (list,), 2)
    return ProcessMesh(_ranks(ranks), all_of(names, str))


def _ranks(held: Any) -> Any:
    return [*map(_ranks, held)] if type(held) is list else whole(held, (int,))


def _part(held: Any, of: Any) -> Part:
    size, axes = whole(held, (list,), 2)
    return Part(whole(size, (int,)), tuple(all_of(axes, int)))


def _layout(held: Any, of: Any) -> Layout:
    mesh, dims, pending = _LAYOUT[1](held, of)
    count = len(whole(mesh, (ProcessMesh,)).shape)
    used = list[int]()
    for dim in whole(dims, (tuple,)):
        parts = any(type(x) is Part for x in whole(dim, (tuple,)))
        used += [axis for part in all_of(dim, Part) for axis in part.axes] if parts else all_of(dim, int)
    for entry in whole(pending, (tuple,)):
        axis, op = whole(entry, (tuple,), 2)
        used.append(whole(axis, (int,)))
        if not REDUCTION.fullmatch(whole(op, (str,))):
            raise RecordingError(f"there is no reduction {op!r}")
    if len({*used}) != len(used) or not all(0 <= axis < count for axis in used):
        raise RecordingError(f"a layout with the axes {used} on a mesh of {count}")
    return Layout.make(mesh, dims, pending)


def _spec(held: Any, of: Any) -> Spec:
    layout, shape, stride, dtype, device, hint, alias = _SPEC[1](held, of)
    whole(layout, (Layout,))
    all_of(whole(shape, (torch.Size,), len(layout.dims)), int)
    all_of(whole(stride, (tuple,), len(shape)), int)
    whole(dtype, (torch.dtype,))
    whole(device, (torch.device,))
    all_of(whole(hint, (tuple,)), int)
    if alias not in (OWN, COPY, WINDOWS, STALE):
        raise RecordingError(f"a tensor that is {alias!r}")
    return Spec.make(layout, shape, stride, dtype, device, hint, alias)


def _line(held: Any, of: Any) -> again.Line:
    mesh, axis = whole(held, (list,), 2)
    mesh = whole(of(mesh), (ProcessMesh,))
    if not 0 <= whole(axis, (int,)) < len(mesh.shape):
        raise RecordingError(f"axis {axis} of a mesh with {len(mesh.shape)}")
    return again.Line(mesh, axis)


def _law(held: Any, of: Any) -> Law:
    name, dtype, *params = whole(of(held), (tuple,))
    return law(whole(name, (str,)), whole(dtype, (torch.dtype,)), *all_of(params, int, float, bool, type(None)))


def _transfer(held: Any, of: Any) -> Transfer:
    shape, itemsize, source, target, hosts = _PLAN[1](held, of)
    for layout in (source, target):
        if len(whole(layout, (Layout,)).dims) != len(all_of(shape, int)):
            raise RecordingError("a transfer of a tensor with other dims than its layouts")
    for host in whole(hosts, (tuple,)):
        all_of(host, int)
    return plan_transfer(tuple(shape), whole(itemsize, (int,)), source, target, hosts)


def _number(held: Any) -> float:
    return float.fromhex(whole(held, (str,)))


def _complex(held: Any, of: Any) -> complex:
    real, imaginary = whole(held, (list,), 2)
    return complex(_number(real), _number(imaginary))


def _pairs(held: Any, of: Any) -> dict[str, Any]:
    return {whole(k, (str,)): of(v) for k, v in (whole(pair, (list,), 2) for pair in whole(held, (list,)))}


_LAYOUT, _SPEC = (
    _many("mesh", "dims", "pending"),
    _many("layout", "shape", "stride", "dtype", "device", "hint", "alias"),
)
_PLAN = _many("shape", "itemsize", "source", "target", "hosts")
_FX = tuple(type(a) for a in fx.Graph().call_function(max, ([0], {})).args)  # what FX makes of lists and dicts
_VALUES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "float": (float, lambda v: v.hex() if math.isfinite(v) else str(v), lambda held, of: _number(held)),
    "complex": (complex, lambda v: [v.real.hex(), v.imag.hex()], _complex),
    "tuple": (tuple, lambda v: [encode(x) for x in v], lambda held, of: tuple(map(of, whole(held, (list,))))),
    "fx list": (_FX[0], lambda v: [encode(x) for x in v], lambda held, of: [*map(of, whole(held, (list,)))]),
    "fx dict": (_FX[1], lambda v: [[k, encode(x)] for k, x in v.items()], _pairs),
    "size": (torch.Size, list, lambda held, of: torch.Size(all_of(held, int))),
    "dtype": _torchs(torch.dtype),
    "memory format": _torchs(torch.memory_format),
    "torch layout": _torchs(torch.layout),
    "device": (torch.device, str, lambda held, of: torch.device(whole(held, (str,)))),
    "mesh": (ProcessMesh, lambda v: [v.mesh.tolist(), list(v.dim_names)], _mesh),
    "part": (Part, lambda v: [v.size, list(v.axes)], _part),
    "layout": (Layout, _LAYOUT[0], _layout),
    "spec": (Spec, _SPEC[0], _spec),
    "line": (again.Line, lambda v: [encode(v.mesh), v.axis], _line),
    "law": (Law, lambda v: encode(v.made), _law),
    "key": (Key, lambda v: [v.low, v.high], lambda held, of: Key(*all_of(whole(held, (list,), 2), int))),
    "transfer": (Transfer, _PLAN[0], _transfer),
    "input": _of(Input),
    "output": _of(Output),
    "effect": _of(Effect),
}  # fmt: skip
