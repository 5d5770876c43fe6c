"""A recording as a file: one safetensors file, the graph as JSON in its header, constants as its tensors. Nothing is pickled, and
what is loaded calls torch's operators and ``recorded.functions`` only."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import fx

from onecard import recorded
from onecard._torch import OpOverload, treespec_dumps, treespec_loads
from onecard.comm import again
from onecard.errors import RecordingError
from onecard.graph.places import is_nameless
from onecard.graph.reads import chosen_by, item
from onecard.graph.recording import Effect, Input, Output, Recording
from onecard.layout import Layout
from onecard.mesh import ProcessMesh
from onecard.parts import Part
from onecard.random import Key, Law, law
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec
from onecard.transfer import Transfer, plan_transfer

FORMAT = 2
_NOT_LOADED = ("from_file",)
_PYTHON = {f.__name__: f for f in (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.neg,
    operator.pos, operator.abs, operator.getitem, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)}  # fmt: skip
_OURS: dict[str, Callable[..., Any]] = {
    "item": item,
    "chosen_by": chosen_by,
    "message": again.message,
    "wait": again.wait,
}
_KINDS = {"DistTensor": DistTensor, "Tensor": torch.Tensor, "float": float, "int": int, "bool": bool, "str": str,
          "NoneType": type(None)}  # fmt: skip


def save(recording: Recording, path: str | Path) -> None:
    """Write a recording to a file.

    Raises:
        RecordingError: it holds something that no file can: an object of Python among its arguments.
    """
    recording, constants = _standing_alone(recording)
    head = {name: encode(getattr(recording, name)) for name in _PLAIN}
    head |= {"format": FORMAT, "graph": _graph(recording.graph), "tree": treespec_dumps(recording.tree)}
    head["questions"] = None if recording.questions is None else _graph(recording.questions)
    head["call"] = None if recording.call is None else treespec_dumps(recording.call)
    tensors = {str(i): _packed(x.detach()) for i, x in constants.items()}
    tensors = tensors or {"none": torch.zeros(0)}  # a file of safetensors holds at least one
    save_file(tensors, str(path), {"recording": json.dumps(head)})


def _standing_alone(recording: Recording) -> tuple[Recording, dict[int, Any]]:
    """Tensors that no name of the program leads to are constants of the file."""
    inputs, roots, constants = list(recording.inputs), list(recording.roots), dict(recording.constants)
    for i, known in enumerate(inputs):
        if known.where[0] == "object" and is_nameless(roots[known.where[1]]) and recording.bound is not None:
            constants[i] = recording.bound.roots[known.where[1]]
            inputs[i] = replace(known, kind="constant", where=("constant",))
    made = recording.with_graph(recording.graph)
    made.inputs, made.roots = tuple(inputs), tuple("" if is_nameless(r) else r for r in roots)
    return made, constants


def _packed(x: torch.Tensor) -> torch.Tensor:
    """What is expanded is one element."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())].contiguous()


_PLAIN = ("name", "inputs", "results", "effects", "answers", "roots", "gradients", "arguments")


def load_recording(path: str | Path) -> Recording:
    """Read a recording from a file. ``bind`` gives it the modules, optimizers and tensors that it runs on.

    Raises:
        RecordingError: the file is none of a recording, or of another format.
    """
    with safe_open(str(path), "pt") as file:
        text = (file.metadata() or {}).get("recording")
        if text is None:
            raise RecordingError(f"{path} is no recording: its header has no graph")
        head = json.loads(text)
        if head.get("format") != FORMAT:
            raise RecordingError(
                f"{path} has format {head.get('format')}; this version reads {FORMAT}. Record the step again"
            )
        tensors = {int(k): file.get_tensor(k) for k in file.keys() if k != "none"}  # noqa: SIM118
    parts = {name: decode(head[name], {}) for name in _PLAIN}
    parts["graph"] = _graph_of(head["graph"])
    for node, known in zip(parts["graph"].find_nodes(op="placeholder"), parts["inputs"], strict=True):
        node.meta["input"] = known
    parts["questions"] = None if head["questions"] is None else _graph_of(head["questions"])
    call = None if head["call"] is None else treespec_loads(head["call"])
    constants = {i: x.expand(parts["inputs"][i].facts[0]) for i, x in tensors.items()}
    return Recording(tree=treespec_loads(head["tree"]), constants=constants, call=call, **parts)


# -- the graph -------------------------------------------------------------------------------------------------------------


def _graph(graph: fx.Graph) -> list[Any]:
    made = []
    for node in graph.nodes:
        meta = {k: node.meta[k] for k in ("phase", "module", "line", "tensor", "spec", "data", "own") if k in node.meta}
        made.append([node.op, node.name, _target(node), encode(node.args), encode(dict(node.kwargs)), encode(meta)])
    return made


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if node.op != "call_function":
        return str(target)
    if isinstance(target, OpOverload):
        return f"op {target}"
    if target in recorded.writes:
        return f"call {recorded.name_of(target)}"
    found = next((f"{kind} {k}" for kind, table in _TABLES.items() for k, f in table.items() if f is target), None)
    if found is None:
        raise RecordingError(f"{target} is no operator of torch or onecard: this recording cannot be saved")
    return found


_TABLES: dict[str, dict[str, Callable[..., Any]]] = {"python": _PYTHON, "own": _OURS, "call": recorded.functions}


def _function(name: str) -> Callable[..., Any]:
    kind, _, rest = name.partition(" ")
    if kind == "op":
        namespace, packet, overload = rest.split(".")
        if packet in _NOT_LOADED:
            raise RecordingError(f"a recording that calls {rest} is not loaded: it reads or writes files")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return _TABLES[kind][rest]


def _graph_of(rows: list[Any]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for op, name, target, args, kwargs, meta in rows:
        function = _function(target) if op == "call_function" else target
        given = decode(args, nodes), decode(kwargs, nodes)
        node = graph.output(given[0][0]) if op == "output" else graph.create_node(op, function, *given, name=name)
        node.meta.update(decode(meta, nodes))
        nodes[name] = node
    return graph


# -- values ----------------------------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A value as JSON: what JSON has not is a dict with one entry, its kind."""
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
    if callable(value) and value in _PYTHON.values():
        return {"function": value.__name__}
    if isinstance(value, type) and value in _KINDS.values():
        return {"type": next(k for k, v in _KINDS.items() if v is value)}
    raise RecordingError(
        f"a recording that holds {value!r} cannot be saved: pass tensors and numbers as arguments, objects by closure"
    )


def decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    """What ``encode`` has encoded."""
    if type(value) is list:
        return [decode(v, nodes) for v in value]
    if type(value) is not dict:
        return value
    ((name, held),) = value.items()
    if name == "dict":
        return {decode(k, nodes): decode(v, nodes) for k, v in held}
    if name == "node":
        return nodes[held]
    if name == "function":
        return _PYTHON[held]
    if name == "type":
        return _KINDS[held]
    return _VALUES[name][2](held, lambda v: decode(v, nodes))


def _of(kind: type) -> tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """A dataclass by its fields."""
    names = [f.name for f in fields(kind)]
    return kind, lambda v: [encode(getattr(v, n)) for n in names], lambda held, of: kind(*map(of, held))


def _torchs(kind: type) -> tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return kind, lambda v: str(v).removeprefix("torch."), lambda held, of: getattr(torch, held)


def _many(*parts: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], list[Any]]]:
    return lambda v: [encode(getattr(v, p)) for p in parts], lambda held, of: [*map(of, held)]


_LAYOUT, _SPEC = (
    _many("mesh", "dims", "pending"),
    _many("layout", "shape", "stride", "dtype", "device", "hint", "alias"),
)
_PLAN = _many("shape", "itemsize", "source", "target", "hosts")
_FX = tuple(type(a) for a in fx.Graph().call_function(max, ([0], {})).args)  # what FX makes of lists and dicts
_VALUES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "float": (float, lambda v: v.hex() if math.isfinite(v) else str(v), lambda held, of: float.fromhex(held)),
    "complex": (complex, lambda v: [v.real, v.imag], lambda held, of: complex(*held)),
    "tuple": (tuple, lambda v: [encode(x) for x in v], lambda held, of: tuple(map(of, held))),
    "fx list": (_FX[0], lambda v: [encode(x) for x in v], lambda held, of: [*map(of, held)]),
    "fx dict": (_FX[1], lambda v: [[k, encode(x)] for k, x in v.items()], lambda held, of: {k: of(x) for k, x in held}),
    "size": (torch.Size, list, lambda held, of: torch.Size(held)),
    "dtype": _torchs(torch.dtype),
    "memory format": _torchs(torch.memory_format),
    "torch layout": _torchs(torch.layout),
    "device": (torch.device, str, lambda held, of: torch.device(held)),
    "mesh": (ProcessMesh, lambda v: [v.mesh.tolist(), list(v.dim_names)], lambda held, of: ProcessMesh(*held)),
    "part": (Part, lambda v: [v.size, list(v.axes)], lambda held, of: Part(held[0], tuple(held[1]))),
    "layout": (Layout, _LAYOUT[0], lambda held, of: Layout.make(*_LAYOUT[1](held, of))),
    "spec": (Spec, _SPEC[0], lambda held, of: Spec.make(*_SPEC[1](held, of))),
    "line": (again.Line, lambda v: [encode(v.mesh), v.axis], lambda held, of: again.Line(of(held[0]), held[1])),
    "law": (Law, lambda v: encode(v.made), lambda held, of: law(*of(held))),
    "key": (Key, list, lambda held, of: Key(*held)),
    "transfer": (Transfer, _PLAN[0], lambda held, of: plan_transfer(*_PLAN[1](held, of))),
    "input": _of(Input),
    "output": _of(Output),
    "effect": _of(Effect),
}  # fmt: skip
