"""Meshes, layouts, specs and machines as JSON and back, for files and other programs. No pickle; all else is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch

from onecard.errors import LayoutError, OnecardError
from onecard.machine.cost import HOST, Curve, Link, Machine
from onecard.machine.kernels import Kernels
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Axes, Dim, Part, is_merged
from onecard.place.reductions import REDUCTION, commute
from onecard.tensor.spec import Spec

VERSION = 1
_FIELDS = {
    "ProcessMesh": ("ranks", "axes"),
    "Layout": ("mesh", "dims", "pending"),
    "Spec": ("layout", "shape", "stride", "dtype", "device"),
    "Machine": tuple(f.name for f in fields(Machine)),
}


def to_json(value: ProcessMesh | Layout | Spec | Machine) -> dict[str, Any]:
    """A mesh, a layout, a spec or a machine as a dict of lists, strings and numbers, which ``json.dumps`` takes.

    Axes are called by their names. Of a spec only what describes the value is written, not what its memory is.

    Raises:
        LayoutError: any other value.

    Example:
        >>> from onecard import Layout, ProcessMesh, Shard
        >>> layout = Layout.of(ProcessMesh([0, 1], ["tp"]), 2, [Shard(1)])
        >>> to_json(layout)["dims"], from_json(to_json(layout)) is layout
        ([[], ['tp']], True)
    """
    kind = next((k for k in (ProcessMesh, Layout, Spec, Machine) if isinstance(value, k)), None)
    if kind is None:
        raise LayoutError(
            f"to_json: want a ProcessMesh, a Layout, a Spec or a Machine, not {type(value).__name__} ({value!r})"
        )
    return {"onecard": kind.__name__, "version": VERSION, **_WRITERS[kind.__name__](value)}


def from_json(data: Any) -> Any:
    """The mesh, layout, spec or machine that ``to_json`` wrote.

    Args:
        data: what ``json.loads`` gives.

    Raises:
        LayoutError: another version, missing or unknown keys, or values that cannot be; says where in the data.
        MeshError: ranks or names that make no mesh.

    Example:
        >>> from_json({"onecard": "ProcessMesh", "version": 1, "ranks": [0, 1], "axes": ["dp"]})
        ProcessMesh([0, 1], dim_names=['dp'])
        >>> from_json({"onecard": "ProcessMesh", "version": 2, "ranks": [0, 1], "axes": ["dp"]})
        Traceback (most recent call last):
        onecard.errors.LayoutError: from_json: ProcessMesh of version 2, but this onecard reads version 1: write it anew ...
    """
    return _read(data, None, "")


def _write_layout(layout: Layout) -> dict[str, Any]:
    names = layout.mesh.dim_names

    def dim(axes: Dim) -> list[Any]:
        if is_merged(axes):
            return [{"size": part.size, "axes": dim(part.axes)} for part in axes]
        return [names[axis] for axis in axes]

    pending = [[names[axis], op] for axis, op in layout.pending]
    return {"mesh": to_json(layout.mesh), "dims": [dim(axes) for axes in layout.dims], "pending": pending}


def _write_spec(spec: Spec) -> dict[str, Any]:
    return {
        "layout": to_json(spec.layout),
        "shape": list(spec.shape),
        "stride": list(spec.stride),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
    }


_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ProcessMesh": lambda mesh: {"ranks": mesh.mesh.tolist(), "axes": mesh.dim_names},
    "Layout": _write_layout,
    "Spec": _write_spec,
    "Machine": asdict,
}


# -- reading -----------------------------------------------------------------------------------------------------------


def _stop(where: str, why: str) -> NoReturn:
    raise LayoutError(f"from_json: {where + ': ' if where else ''}{why}")


def _read(data: Any, wanted: str | None, where: str) -> Any:
    """One value; ``where`` it stands in the whole, ``wanted`` what it has to be."""
    _want(isinstance(data, dict), where, "an object with the key 'onecard', as to_json writes it", data)
    kind = data.get("onecard")
    if not isinstance(kind, str) or kind not in _FIELDS or wanted not in (None, kind):
        _stop(where, f"'onecard' is {kind!r}, want {wanted or ' or '.join(_FIELDS)}")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        advice = (
            f"but this onecard reads version {VERSION}: write it anew with to_json, or take the onecard that wrote it"
        )
        _stop(where, f"{kind} of version {version!r}, {advice}")
    expected = {"onecard", "version", *_FIELDS[kind]}
    if missing := sorted(expected - data.keys() - {*HOST}):  # those are newer than the version
        _stop(where, f"{kind} lacks {missing}")
    if unknown := sorted(map(str, data.keys() - expected)):
        _stop(where, f"{kind} has unknown keys {unknown}; version {VERSION} has {sorted(expected)}")
    return _READERS[kind](data, f"{where}." if where else "")


def _want(holds: bool, where: str, what: str, found: Any) -> None:
    if not holds:
        _stop(where, f"want {what}, not {found!r}"[:400])


def _read_mesh(data: dict[str, Any], where: str) -> ProcessMesh:
    names = data["axes"]
    _want(_strings(names) and bool(names), f"{where}axes", "a list of axis names", names)
    try:
        return ProcessMesh(_ranks(data["ranks"], f"{where}ranks"), names)
    except OnecardError as fault:
        raise type(fault)(f"from_json: {fault}") from None


def _ranks(value: Any, where: str) -> Any:
    _want(isinstance(value, list) or _count(value), where, "nested lists of ranks", value)
    return [_ranks(item, where) for item in value] if isinstance(value, list) else value


def _read_layout(data: dict[str, Any], where: str) -> Layout:
    mesh = _read(data["mesh"], "ProcessMesh", f"{where}mesh")
    used: list[int] = []
    _want(isinstance(data["dims"], list), f"{where}dims", "a list with an entry for each dim", data["dims"])
    dims = tuple(_read_dim(dim, mesh, used, f"{where}dims[{d}]") for d, dim in enumerate(data["dims"]))
    pending = _read_pending(data["pending"], mesh, used, f"{where}pending")
    return Layout.make(mesh, dims, pending)


def _read_dim(dim: Any, mesh: ProcessMesh, used: list[int], where: str) -> Dim:
    _want(isinstance(dim, list), where, "a list of axis names, or of parts {'size', 'axes'}", dim)
    if not any(isinstance(item, dict) for item in dim):
        return _read_axes(dim, mesh, used, where)
    parts = []
    for item in dim:
        good = isinstance(item, dict) and item.keys() == {"size", "axes"} and _count(item["size"])
        _want(good, where, "parts {'size': number, 'axes': [names]}", item)
        parts.append(Part(item["size"], _read_axes(item["axes"], mesh, used, where)))
    _want(len(parts) > 1, where, "at least two parts; a dim of one is its axes alone", dim)
    return tuple(parts)


def _read_axes(names: Any, mesh: ProcessMesh, used: list[int], where: str) -> Axes:
    _want(_strings(names), where, "a list of axis names", names)
    return tuple(_read_axis(name, mesh, used, where) for name in names)


def _read_axis(name: str, mesh: ProcessMesh, used: list[int], where: str) -> int:
    if name not in mesh.dim_names:
        _stop(where, f"the mesh has no axis {name!r}; its axes are {mesh.dim_names}")
    axis = mesh.axis(name)
    if axis in used:
        _stop(where, f"axis {name!r} comes twice; an axis cuts one dim, or is pending")
    used.append(axis)
    return axis


def _read_pending(data: Any, mesh: ProcessMesh, used: list[int], where: str) -> tuple[tuple[int, str], ...]:
    pairs = isinstance(data, list) and all(_strings(pair) and len(pair) == 2 for pair in data)
    _want(pairs, where, "a list of [axis name, reduction]", data)
    found = []
    for name, op in data:
        if not REDUCTION.fullmatch(op):
            _stop(where, f"there is no reduction {op!r}")
        found.append((_read_axis(name, mesh, used, where), op))
    _want(commute(op for _, op in found), where, "reductions that may be done in any order", data)
    return tuple(sorted(found))


def _read_spec(data: dict[str, Any], where: str) -> Spec:
    layout = _read(data["layout"], "Layout", f"{where}layout")
    for key in ("shape", "stride"):
        good = isinstance(data[key], list) and len(data[key]) == layout.ndim and all(map(_count, data[key]))
        _want(good, f"{where}{key}", f"{layout.ndim} numbers, one for each dim of the layout", data[key])
    for d, (size, dim) in enumerate(zip(data["shape"], layout.dims, strict=True)):
        if is_merged(dim) and prod(part.size for part in dim) != size:
            _stop(f"{where}shape", f"dim {d} has {size} elements, but its parts {[p.size for p in dim]} make others")
    dtype, device = _read_dtype(data["dtype"], f"{where}dtype"), _read_device(data["device"], f"{where}device")
    return Spec.make(layout, torch.Size(data["shape"]), tuple(data["stride"]), dtype, device)


def _read_machine(data: dict[str, Any], where: str) -> Machine:
    given = {f.name: data.get(f.name, 0.0) for f in fields(Machine)}
    for key in (f.name for f in fields(Machine) if f.type in ("float", "int")):
        least = 0 if key in ("latency", "capacity", "launch", "beside", "per_host", *HOST) else 1e-300
        good = type(given[key]) in (int, float) and least <= given[key] < float("inf")
        _want(good, f"{where}{key}", "a number above zero" if least else "a number of at least zero", given[key])
    for key in ("name", "source"):
        _want(isinstance(given[key], str), f"{where}{key}", "words", given[key])
    for key, read in (("dtypes", _positive), ("links", _read_link), ("curves", _read_curve)):
        _want(isinstance(given[key], dict), f"{where}{key}", "an object", given[key])
        given[key] = {name: read(value, f"{where}{key}.{name}") for name, value in given[key].items()}
    given["kernels"] = _read_kernels(data["kernels"], f"{where}kernels")
    return Machine(**given)


def _read_kernels(data: Any, where: str) -> Kernels | None:
    if data is None:
        return None
    names = {f.name for f in fields(Kernels)}
    _want(isinstance(data, dict) and data.keys() == names, where, f"null, or an object of {sorted(names)}", data)
    given = dict(data)
    for field in fields(Kernels):
        value, at = data[field.name], f"{where}.{field.name}"
        if field.type == "Shares":
            _want(isinstance(value, dict) and bool(value), at, "an object of shares", value)
            given[field.name] = {str(name): _positive(share, f"{at}.{name}") for name, share in value.items()}
        elif field.type in ("float", "int"):
            good = type(value) in (int, float) and 0 <= value < float("inf")
            _want(good and (field.type == "float" or type(value) is int), at, "a number of at least zero", value)
    return Kernels(**given)


def _positive(value: Any, where: str) -> float:
    _want(type(value) in (int, float) and 0 < value < float("inf"), where, "a number above zero", value)
    return float(value)


def _read_link(data: Any, where: str) -> Link:
    _want(
        isinstance(data, dict) and data.keys() == {"latency", "bandwidth"},
        where,
        "{'latency': seconds, 'bandwidth': bytes}",
        data,
    )
    return Link(_positive(data["latency"], f"{where}.latency"), _positive(data["bandwidth"], f"{where}.bandwidth"))


def _read_curve(data: Any, where: str) -> Curve:
    good = isinstance(data, list | tuple) and data and all(isinstance(p, list | tuple) and len(p) == 2 for p in data)
    _want(bool(good), where, "a list of [size, seconds]", data)
    points = tuple((_positive(size, where), _positive(t, where)) for size, t in data)
    _want(all(a[0] < b[0] for a, b in pairwise(points)), where, "sizes that ascend", data)
    return points


def _read_dtype(name: Any, where: str) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        _stop(where, f"want a dtype of torch such as 'float32', not {name!r}")
    return found


def _read_device(name: Any, where: str) -> torch.device:
    try:
        return torch.device(name if isinstance(name, str) else "")
    except RuntimeError:
        _stop(where, f"want a device such as 'cpu' or 'cuda:0', not {name!r}")


_READERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "ProcessMesh": _read_mesh,
    "Layout": _read_layout,
    "Spec": _read_spec,
    "Machine": _read_machine,
}


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _strings(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)
