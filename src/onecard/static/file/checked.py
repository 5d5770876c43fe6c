"""Whether what was read from a file is a recording: its places, its results, its nodes, each rehearsed without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch.names import OpOverload, below_autograd
from onecard.errors import RecordingError
from onecard.static.file.encoding import all_of, whole
from onecard.static.guards.reads import sized_by_values
from onecard.static.step.step import BESIDE, Effect, Input, Output, RecordedStep
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec

_INPUTS = {"argument", "parameter", "buffer", "gradient", "state", "tensor", "number", "generator", "constant"}
_EFFECTS = {*BESIDE, "place", "state", "new state", "group"}


def check(made: RecordedStep) -> None:
    """Refuse what is no recording.

    Raises:
        RecordingError: a part of it is not what it has to be; says which.
    """
    for name in whole(made.roots, (tuple,)):
        whole(name, (str,))
    kinds = [_argument(*whole(given, (tuple,), 2)) for given in whole(made.arguments, (tuple,))]
    for i, kind in enumerate(kinds):
        if not 0 <= whole(kind[-1], (int,)) <= i:
            raise RecordingError(f"argument {i} is the same as argument {kind[-1]}")
    places = _Places(len(kinds), len(made.roots))
    nodes = [n for n in made.graph.nodes if n.op == "placeholder"]
    if len(whole(made.inputs, (tuple,))) != len(nodes):
        raise RecordingError(f"{len(made.inputs)} inputs of a graph that has {len(nodes)}")
    for i, known in enumerate(made.inputs):
        _input(i, whole(known, (Input,)), places, made)
    count = len(whole(_outputs(made.graph), (tuple,)))
    for result in whole(made.results, (tuple,)):
        if type(result) is Output:
            _output(result, count)
        elif type(result) is tuple and result[:1] == ("place",):
            places.check(whole(result, (tuple,), 2)[1])
    if made.tree.num_leaves != len(made.results):
        raise RecordingError(f"{len(made.results)} results in a form for {made.tree.num_leaves}")
    if made.call is not None and made.call.num_leaves != len(kinds):
        raise RecordingError(f"{len(kinds)} arguments in a form for {made.call.num_leaves}")
    for effect in whole(made.effects, (tuple,)):
        _effect(whole(effect, (Effect,)), places, count)
    for given in whole(made.gradients, (tuple,)):
        where, had = whole(given, (tuple,), 2)
        places.check(where)
        whole(had, (bool,))
    for given in whole(made.unreduced, (tuple,)):
        where, before, behind, reached = whole(given, (tuple,), 4)
        places.check(where)
        for words in (before, behind):
            all_of(whole(words, (tuple,), 7), bool)
        whole(reached, (bool,))
    all_of(made.answers, bool)
    if (made.conditions is None) != (not made.answers) or (
        made.conditions is not None and len(_outputs(made.conditions)) != len(made.answers)
    ):
        raise RecordingError("answers to other questions than it has")
    _beliefs(made)


def _outputs(graph: fx.Graph) -> tuple[Any, ...]:
    nodes: Any = list(graph.nodes)
    if not nodes or nodes[-1].op != "output":
        raise RecordingError("a graph without results")
    for given in nodes[-1].args[0]:
        if not isinstance(given, fx.Node):
            raise RecordingError(f"a result that is {str(given)[:80]!r}, and no node")
    return tuple(nodes[-1].args[0])


def _beliefs(made: RecordedStep) -> None:
    for given in whole(made.beliefs, (tuple,)):
        whole(whole(given, (tuple,), 2)[0], (str,))
    if made.around is not None:
        enabled, around = whole(made.around, (tuple,), 2)
        whole(enabled, (bool,))
        whole(around, (torch.dtype, tuple))


class _Places:
    """Places in a program with so many arguments and roots."""

    def __init__(self, arguments: int, roots: int) -> None:
        self.arguments, self.roots = arguments, roots

    def check(self, where: Any) -> None:
        """Whether it is one."""
        match whole(where, (tuple,)):
            case ("argument", int(i)):
                fits = type(i) is int and 0 <= i < self.arguments
            case ("trained", tuple(inner)):
                fits = inner[:1] == ("parameter",)
                self.check(inner)
            case ("gradient" | "kept" | "wide", tuple(inner)):
                fits = inner[:1] not in [(kind,) for kind in BESIDE]
                self.check(inner)
            case ("object", int(r)):
                fits = self._root(r)
            case ("parameter" | "buffer", int(r), str()):
                fits = self._root(r)
            case ("member", int(r), int(g), int(i)):
                fits = self._root(r) and g >= 0 and i >= 0
            case ("state", int(r), int(g), int(i), str() | int()):
                fits = self._root(r) and g >= 0 and i >= 0
            case ("group", int(r), int(g), str(key), None | int()):
                fits = self._root(r) and g >= 0 and key != "params"
            case ("constant",):
                fits = True
            case _:
                fits = False
        if not fits:
            raise RecordingError(f"{str(where)[:80]} is no place in a program")

    def _root(self, r: Any) -> bool:
        return type(r) is int and 0 <= r < self.roots


def _argument(name: Any, kind: Any) -> Any:
    """What of an argument it depends on (``kinds.kind_of``)."""
    whole(name, (str,))
    first = whole(kind, (tuple,))[:1]
    if first == (DistTensor,):
        whole(whole(kind, (tuple,), 4)[1], (Spec,))
        whole(kind[2], (bool,))
    elif first == (Tensor,):
        shape, stride, dtype, device, wants = whole(kind, (tuple,), 7)[1:6]
        _facts((tuple(all_of(whole(shape, (torch.Size,)), int)), stride, dtype, device))
        whole(wants, (bool,))
    elif first == (float,):
        whole(kind, (tuple,), 2)
    else:
        none, of, value, _ = whole(kind, (tuple,), 4)
        if none is not None or type(value) is not of:
            raise RecordingError(f"an argument that is {str(kind)[:80]}")
    return kind


def _facts(facts: Any) -> None:
    shape, stride, dtype, device = whole(facts, (tuple,), 4)
    all_of(whole(shape, (tuple,)), int)
    all_of(whole(stride, (tuple,), len(shape)), int)
    whole(dtype, (torch.dtype,))
    whole(device, (torch.device,))
    if min((*shape, *stride), default=0) < 0:
        raise RecordingError(f"a tensor of shape {shape} and strides {stride}")


def _input(i: int, known: Input, places: _Places, made: RecordedStep) -> None:
    if known.kind not in _INPUTS:
        raise RecordingError(f"an input that is a {known.kind!r}")
    whole(known.name, (str,))
    places.check(known.where)
    whole(known.spec, (Spec, type(None)))
    if known.kind in ("number", "generator"):
        whole(known.facts, (tuple,), 0)
    else:
        _facts(known.facts)
    constant = known.kind == "constant"
    if constant is not (i in made.constants) or constant is not (known.where == ("constant",)):
        raise RecordingError(f"input {i} is a {known.kind}, and its place is {known.where}")
    for other in all_of(whole(known.shares, (tuple,)), int):
        if not 0 <= other < len(made.inputs) or other == i:
            raise RecordingError(f"input {i} has memory in common with input {other}")


def _output(output: Output, count: int) -> None:
    if not 0 <= whole(output.position, (int,)) < count:
        raise RecordingError(f"result {output.position} of a graph with {count}")
    whole(output.spec, (Spec, type(None)))
    whole(output.grad, (bool,))


def _effect(effect: Effect, places: _Places, count: int) -> None:
    places.check(effect.where)
    first = {"new state": "state", "gradient": effect.where[0], "place": effect.where[0]}.get(effect.kind, effect.kind)
    if effect.kind not in _EFFECTS or effect.where[0] != first or effect.where == ("constant",):
        raise RecordingError(f"an effect {effect.kind!r} on {effect.where}")
    if effect.output is not None:
        _output(whole(effect.output, (Output,)), count)
    elif effect.kind not in BESIDE:
        raise RecordingError(f"an effect {effect.kind!r} without a value")


# -- nodes -----------------------------------------------------------------------------------------------------------------


def check_meta(name: str, meta: dict[str, Any]) -> None:
    """What is noted of a node."""
    for key, kinds in (
        ("phase", str),
        ("module", str),
        ("line", str),
        ("data", bool),
        ("own", bool),
        ("spec", Spec),
        ("rank", int),
    ):
        if key in meta:
            whole(meta[key], (kinds, type(None)) if key == "spec" else (kinds,))
    if "tensor" in meta:
        _facts(meta["tensor"])
    if more := {*meta} - {"phase", "module", "line", "data", "own", "spec", "tensor", "rank"}:
        raise RecordingError(f"{name} has {sorted(more)} noted, which nobody knows")


def rehearse(graph: fx.Graph) -> None:
    """Call all operators with tensors without data like their operands: each must take them, and give what the file says.

    Raises:
        RecordingError: one does not.
    """
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        made = _rehearsed(node, values) if isinstance(node.target, OpOverload) else None
        # One that was written to may have another shape since: it stays the same tensor.
        values[node] = (
            made if any(made is values[n] for n in node.all_input_nodes) and made is not None else _blank(node)
        )


def _rehearsed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What an operator gives; None if nobody can tell without data: it checks what it is given when it runs."""
    operator: Any = node.target
    if any(values[n] is None for n in node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    try:
        if sized_by_values(operator, args, kwargs):
            return None
        with below_autograd():
            result = operator(*args, **kwargs)
    except NotImplementedError:
        return None
    except Exception as fault:
        said = str(fault).strip()[:200]
        raise RecordingError(f"{node.name}: {operator} does not take what it is given: {said}") from None
    facts = node.meta.get("tensor")
    if facts is not None and isinstance(result, Tensor) and (tuple(result.shape), result.dtype) != (facts[0], facts[2]):
        made = f"{list(result.shape)} {result.dtype}"
        raise RecordingError(f"{node.name}: {operator} gives {made}, and not {list(facts[0])} {facts[2]}")
    return result


def _blank(node: fx.Node) -> Any:
    """What stands for a node's result: a tensor without data, a number, None of what is not known."""
    if "tensor" in node.meta:
        shape, stride, dtype, _ = node.meta["tensor"]
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    known = node.meta.get("input")
    return 0.5 if known is not None and known.kind == "number" else None
