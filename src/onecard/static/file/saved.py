"""A recording as a file: one safetensors file, the graph as JSON in its header, constants as its tensors.

Nothing is pickled. A file is data, whoever made it: what it calls is compared with closed tables (``file/targets.py``), what it
names is looked up in dicts of modules (``places.py``), and neither becomes text of a program (``source.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import fx

from onecard._torch.names import no_dispatch
from onecard.errors import RecordingError
from onecard.static.file.checked import check, check_meta, rehearse
from onecard.static.file.encoding import decode, encode, whole
from onecard.static.file.targets import check_call, function_of, name_of
from onecard.static.file.trees import decode_tree, encode_tree
from onecard.static.guards.places import is_nameless
from onecard.static.step.step import RecordedStep
from onecard.tensor.dist_tensor import DistTensor

FORMAT = 6
_PLAIN = (
    "name",
    "inputs",
    "results",
    "effects",
    "answers",
    "roots",
    "gradients",
    "unreduced",
    "arguments",
    "beliefs",
    "around",
)
_NOTED = ("phase", "module", "line", "tensor", "spec", "data", "own", "rank")


def save(recording: RecordedStep, path: str | Path) -> None:
    """Write a recording to a file.

    Raises:
        RecordingError: it holds something that no file can: an object of Python among its arguments.
    """
    recording, constants = _standing_alone(recording)
    head = {name: encode(getattr(recording, name)) for name in _PLAIN}
    head |= {"format": FORMAT, "graph": _graph(recording.graph), "tree": encode_tree(recording.tree)}
    head["questions"] = None if recording.conditions is None else _graph(recording.conditions)
    head["call"] = None if recording.call is None else encode_tree(recording.call)
    if distributed := [x for x in constants.values() if isinstance(x, DistTensor)]:
        raise RecordingError(
            f"{recording.name} uses {distributed[0]._spec!r}, to which no name of the program leads (an entry of a slice, or "
            "of a container made in the step), so that a file cannot say what it is: pass it as an argument, or keep it in a "
            "module or under a name of its own"
        )
    if any(type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter) for x in constants.values()):
        raise RecordingError(f"{recording.name} was recorded without data, so that its constants have none to be saved")
    with no_dispatch():  # also where new tensors have no data
        tensors = {str(i): _packed(x.detach()) for i, x in constants.items()}
        tensors = tensors or {"none": torch.zeros(0, device="cpu")}  # a file of safetensors holds at least one
        write(path, json.dumps(head), tensors)


def write(path: str | Path, text: str, tensors: dict[str, torch.Tensor]) -> None:
    """The file, with a checksum of all that is in it."""
    try:
        save_file(tensors, str(path), {"recording": text, "checksum": _checksum(text, tensors)})
    except SafetensorError as fault:
        raise RecordingError(f"a recording of {len(text):,} characters cannot be written to {path}: {fault}") from None


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """Of the graph and the constants: it tells damage, not forgery."""
    found = hashlib.sha256(text.encode())
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {list(x.shape)} {x.dtype} ".encode())
        found.update(
            x.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def _standing_alone(recording: RecordedStep) -> tuple[RecordedStep, dict[int, Any]]:
    """Tensors that no name of the program leads to are constants of the file."""
    inputs, roots, constants = list(recording.inputs), list(recording.roots), dict(recording.constants)
    sharing = {i for at, known in enumerate(inputs) for i in (at, *known.shares) if known.shares}
    for i, known in enumerate(inputs):
        if known.where[0] == "object" and is_nameless(roots[known.where[1]]) and recording.bound is not None:
            if i in sharing:
                raise RecordingError(
                    f"{recording.name} reads a tensor of shape {[*known.facts[0]]} that no name of the program leads to, with "
                    "memory in common with another one: a file would hold a copy. Keep it in a variable around the step"
                )
            constants[i] = recording.bound.roots[known.where[1]]
            inputs[i] = replace(known, kind="constant", where=("constant",))
    made = recording.with_graph(recording.graph)
    made.inputs, made.roots = tuple(inputs), tuple("" if is_nameless(r) else r for r in roots)
    return made, constants


def _packed(x: torch.Tensor) -> torch.Tensor:
    """What is expanded is one element."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())].contiguous()


def load(path: str | Path, trust: Collection[str | type] = ()) -> RecordedStep:
    """Read a step from a file; see ``onecard.load_recording``."""
    path = Path(path)
    try:
        with no_dispatch():
            return _step(*_read(path), trust, str(path))
    except RecordingError as fault:
        raise RecordingError(f"{path}: {fault}") from None
    except (
        SafetensorError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as fault:
        said = f"{type(fault).__name__}: {str(fault).strip()[:200]}"
        raise RecordingError(f"{path} is damaged, or no recording: {said}") from None


def _read(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    with safe_open(str(path), "pt") as file:
        meta = file.metadata() or {}
        if "recording" not in meta:
            raise RecordingError("it is no recording: its header has no graph")
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    text = meta["recording"]
    if "checksum" in meta and meta["checksum"] != _checksum(text, tensors):
        raise RecordingError("it is damaged: its checksum is another one")
    return text, tensors


def _step(text: str, tensors: dict[str, torch.Tensor], trust: Collection[str | type], path: str) -> RecordedStep:
    head = whole(json.loads(text), (dict,))
    if head.get("format") != FORMAT:
        raise RecordingError(f"it has format {head.get('format')}; this version reads {FORMAT}. Record the step again")
    spaces = [space for space in trust if isinstance(space, str)]
    classes = [kind for kind in trust if isinstance(kind, type)]
    parts = {name: decode(head[name], {}) for name in _PLAIN}
    whole(parts["name"], (str,))
    graph = _graph_of(head["graph"], spaces, parts["inputs"])
    conditions = None if head["questions"] is None else _graph_of(head["questions"], spaces, parts["inputs"])
    call = None if head["call"] is None else decode_tree(head["call"])
    constants = {int(i): x.expand(parts["inputs"][int(i)].facts[0]) for i, x in tensors.items() if i != "none"}
    for i, x in constants.items():
        if x.dtype != parts["inputs"][i].facts[2]:
            raise RecordingError(f"constant {i} is {x.dtype}, and not {parts['inputs'][i].facts[2]}")
    tree = decode_tree(head["tree"], classes)
    made = RecordedStep(
        graph=graph, conditions=conditions, tree=tree, constants=constants, call=call, file=path, **parts
    )
    check(made)
    for each in (graph, conditions):
        if each is not None:
            rehearse(each)
    return made


# -- the graph -------------------------------------------------------------------------------------------------------------


def _graph(graph: fx.Graph) -> list[Any]:
    made = []
    for node in graph.nodes:
        meta = {k: node.meta[k] for k in _NOTED if k in node.meta}
        target = name_of(node.target) if node.op == "call_function" else str(node.target)
        made.append([node.op, node.name, target, encode(node.args), encode(dict(node.kwargs)), encode(meta)])
    return made


def _graph_of(rows: Any, trust: Collection[str], inputs: Any) -> fx.Graph:
    graph, nodes, count = fx.Graph(), dict[str, fx.Node](), 0
    for row in whole(rows, (list,)):
        op, name, target, args, kwargs, meta = whole(row, (list,), 6)
        if whole(name, (str,)) in nodes or "output" in nodes:
            raise RecordingError(f"node {name!r} stands where none can")
        given, named = whole(decode(args, nodes), (tuple,)), whole(decode(kwargs, nodes), (dict,))
        if op == "placeholder":
            node = graph.placeholder(f"in{count}")
            node.meta["input"] = inputs[count]
            count += 1
        elif op == "call_function":
            function = function_of(target, trust)
            check_call(f"{name} ({target})", function, given, named)
            node = graph.create_node(op, function, given, named)
        elif op == "output":
            node = graph.output(whole(whole(given, (tuple,), 1)[0], (tuple,)))
            name = "output"
        else:
            raise RecordingError(f"a node that is a {str(op)[:40]!r}")
        noted = whole(decode(meta, nodes), (dict,))
        check_meta(name, noted)
        node.meta.update(noted)
        nodes[name] = node
    return graph
