"""Machines as JSON files: one that was measured, or a data sheet's with other numbers. Pure but for the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from onecard.errors import CostError, PlanError
from onecard.machine.cost import HOST, MACHINE, PRESETS, Link, Machine
from onecard.machine.kernels import Kernels
from onecard.planning import json_text
from onecard.planning.json_text import Located
from onecard.planning.wanted import spoken

VERSION = 1
_MAY_BE_NONE = (
    "latency",
    "launch",
    *HOST,
)  # seconds, and rates of what may not be there; all else is a rate, a share or a size


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine to a JSON file, which ``load_machine`` and ``--machine`` of the commands read."""
    data: dict[str, Any] = {"onecard": "Machine", "version": VERSION}
    like = machine.name in PRESETS and Machine.preset(machine.name).kernels == machine.kernels
    if like:
        data["like"] = machine.name
    data |= {field.name: getattr(machine, field.name) for field in fields(machine) if field.name != "kernels"}
    if machine.kernels is not None and not like:  # a measured GPU's; else "like" brings them
        data["kernels"] = asdict(machine.kernels)
    data["links"] = {
        axis: {"latency": link.latency, "bandwidth": link.bandwidth} for axis, link in machine.links.items()
    }
    data["dtypes"], data["curves"] = dict(machine.dtypes), dict(machine.curves)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
    Path(path).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def load_machine(path: str | Path) -> Machine:
    """Read a machine from a JSON file: what ``save_machine`` wrote, or fields beside ``"like"``, the preset with the others.

    Raises:
        PlanError: with file, line and field.

    Example:
        >>> import tempfile
        >>> text = '{"onecard": "Machine", "version": 1, "like": "H100", "capacity": 96000000000}'
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     _ = file.write(text), file.flush()
        ...     found = load_machine(file.name)
        >>> found.capacity, found.memory
        (96000000000, 3350000000000.0)
    """
    found = json_text.located(json_text.text_of(Path(path)), str(path))
    data = found.value
    if not isinstance(data, dict) or data.get("onecard") != "Machine":
        raise PlanError(f'{found.where()}: is no file of a machine; one has "onecard": "Machine", "version": {VERSION}')
    if data.get("version") != VERSION:
        raise PlanError(
            f'{found.where(("version",))}: version {data.get("version")!r}; this onecard reads "version": {VERSION}'
        )
    given = {name: value for name, value in data.items() if name not in ("onecard", "version", "like")}
    made = {name: _value(found, name, value) for name, value in given.items()}
    return replace(_like(found, data.get("like")), **made)


def machine_named(text: str, measure: Callable[[], Machine]) -> Machine:
    """A preset by its name, a file's, or, for "here", what ``measure`` gives.

    Example:
        >>> machine_named("h100", Machine.measure).name
        'H100'
    """
    if text == "here":
        return measure()
    if text.upper() in PRESETS:
        return Machine.preset(text.upper())
    if Path(text).suffix == ".json" or Path(text).exists():
        return load_machine(text)
    raise CostError(
        f"there is no machine {text!r}; there are {', '.join(PRESETS)}, here (this one is measured), or a file machine.json"
    )


def this_machine() -> Machine:
    """The preset of this process's GPU; a machine by default where there is none, or another one."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        for known in ("H200", "H100", "A100"):
            if known in name:
                return Machine.preset(known)
    return MACHINE


def _like(found: Located, name: Any) -> Machine:
    if name is None:
        return Machine()
    if name not in PRESETS:
        raise PlanError(f"{found.where(('like',))}: there is no machine {name!r}; there are {', '.join(PRESETS)}")
    return Machine.preset(name)


def _value(found: Located, name: str, value: Any) -> Any:
    readers: dict[str, Callable[[Located, str, Any], Any]] = {
        "name": _text, "source": _text, "dtypes": _dtypes, "links": _links, "curves": _curves,
        "kernels": _kernels,
    }  # fmt: skip
    known = {field.name: field.type for field in fields(Machine)}
    if name not in known:
        raise PlanError(f"{found.where((name,))}: a machine has no field {name!r}; there are {', '.join(known)}, like")
    if name in readers:
        return readers[name](found, name, value)
    if known[name] == "int":
        if type(value) is not int or value < 0:
            raise PlanError(f"{found.where((name,))}: {name} is {value!r}; want a whole number, 0 or more")
        return value
    return _number(found, (name,), value)


def _number(found: Located, way: tuple[str | int, ...], value: Any) -> float:
    none = way[-1] in _MAY_BE_NONE
    if type(value) not in (int, float) or not 0 <= value < float("inf") or not (value or none):
        want = "want a number, 0 or more" if none else "want a number above 0"
        raise PlanError(f"{found.where(way)}: {'.'.join(map(str, way))} is a {spoken(value)} ({value!r}); {want}")
    return float(value)


def _text(found: Located, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{found.where((name,))}: {name} is a {spoken(value)}; want a text")
    return value


def _object(found: Located, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{found.where((name,))}: {name} is a {spoken(value)}; want an object")
    return value


def _dtypes(found: Located, name: str, value: Any) -> dict[str, float]:
    return {dtype: _number(found, (name, dtype), rate) for dtype, rate in _object(found, name, value).items()}


def _links(found: Located, name: str, value: Any) -> dict[str, Link]:
    made = {}
    for axis, link in _object(found, name, value).items():
        if not isinstance(link, dict) or link.keys() != {"latency", "bandwidth"}:
            raise PlanError(
                f'{found.where((name, axis))}: a link is {{"latency": seconds, "bandwidth": bytes a second}}'
            )
        made[axis] = Link(*(_number(found, (name, axis, key), link[key]) for key in ("latency", "bandwidth")))
    return made


def _kernels(found: Located, name: str, value: Any) -> Kernels:
    known = {field.name: str(field.type) for field in fields(Kernels)}
    given = _object(found, name, value)
    for each in (*given, *known):
        if each not in known or (each not in given and each not in ("source", "made")):
            what = "has no field" if each not in known else "lacks the field"
            raise PlanError(f"{found.where((name, each))}: {name} {what} {each!r}; there are {', '.join(known)}")
    made: dict[str, Any] = {}
    for each, part in given.items():
        if known[each] == "Shares":
            made[each] = {k: _number(found, (name, each, k), x) for k, x in _object(found, each, part).items()}
        elif known[each] in ("int", "float"):
            number = _number(found, (name, each), part)
            made[each] = int(number) if known[each] == "int" else number
        else:
            made[each] = part if each == "made" else _text(found, each, part)
    if "" not in made["products"] or "" not in made["memory"]:
        raise PlanError(f'{found.where((name,))}: products and memory have a share "" of what has none of its own')
    return Kernels(**made)


def _curves(found: Located, name: str, value: Any) -> dict[str, tuple[tuple[float, float], ...]]:
    made = {}
    for family, curve in _object(found, name, value).items():
        if not isinstance(curve, list) or not curve or not all(isinstance(p, list) and len(p) == 2 for p in curve):
            raise PlanError(f"{found.where((name, family))}: a curve is a list of [size, seconds]")
        points = [tuple(_number(found, (name, family, i, k), x) for k, x in enumerate(p)) for i, p in enumerate(curve)]
        if any(a[0] >= b[0] for a, b in pairwise(points)):
            raise PlanError(f"{found.where((name, family))}: sizes of a curve go upwards")
        made[family] = tuple(points)
    return made  # type: ignore[return-value]
