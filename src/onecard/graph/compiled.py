"""A graph as a Python function: one line for each node, torch's functions called directly, tensors dropped at their last use.

torch's own functions (``torch.mm``) take half the time of the operators that a graph holds (``aten.mm.default``). One is used in
place of the other only where a call with the same arguments, on tensors without data, has shown that it gives that operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onecard import _torch
from onecard._torch import OpOverload, TorchDispatchMode
from onecard.comm import again
from onecard.graph.memory import Memory, effects
from onecard.graph.segments import Segment, function_of, segments

ONCE = 64 * 1024
"""Bytes up to which a tensor that is the same at each call is kept."""

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%",
    operator.pow: "**", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}  # fmt: skip


def compiled(graph: fx.Graph, backend: str = "eager") -> Callable[..., tuple[Any, ...]]:
    """A function of the graph's inputs that gives its outputs; to be called below autograd (``below``).

    ``backend``: "inductor" compiles what lies between messages (``segments.py``).
    """
    writer = _Writer()
    once = _once(graph)
    if once:
        _compute(once, writer)
    last = _last_uses(graph)
    runs = _runs(graph, once) if backend == "inductor" else {}
    opened, hidden = False, set[fx.Node]()  # whether a run has begun and not ended; nodes that are no variables
    gone = list[fx.Node]()  # variables to drop as soon as no run is open
    for node in graph.nodes:
        run = runs.get(node)
        if run is None and node not in once:
            writer.node(node)
        elif run is not None and node is run[0].nodes[-1]:
            writer.run(*run)
            hidden |= {*run[0].nodes} - {*run[0].outputs, *run[0].views}
        gone += [n for n in last.get(node, ()) if n not in once]
        opened = opened if run is None else node is not run[0].nodes[-1]
        if not opened:
            if names := [writer.name(n) for n in gone if n not in hidden]:
                writer.lines.append(f"    del {', '.join(names)}")
            gone = []
    text = f"def run({', '.join(writer.inputs)}):\n" + "\n".join(writer.lines)
    exec(compile(text, "<recording>", "exec"), writer.names)
    return writer.names["run"]


def _runs(graph: fx.Graph, once: dict[fx.Node, None]) -> dict[fx.Node, tuple[Segment, Any]]:
    """For each node of a run that was compiled the run and its function."""
    found = [(segment, function_of(segment)) for segment in segments(graph, once)]
    return {node: (segment, run) for segment, run in found if run is not None for node in segment.nodes}


def _once(graph: fx.Graph) -> dict[fx.Node, None]:
    """Nodes that give the same at each call and are not written to: small ones that depend on no input."""
    found: dict[fx.Node, None] = {}
    starts = [
        n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, OpOverload) and not n.all_input_nodes
    ]
    if not starts:
        return found
    memory = Memory(graph)
    out: Any = next(iter(reversed(graph.nodes))).args[0]
    shown = frozenset[fx.Node]().union(*(memory.roots[n] for n in out if isinstance(n, fx.Node)))
    for node in graph.nodes:
        whole = node.op == "call_function" and isinstance(node.target, OpOverload) and "tensor" in node.meta
        if whole and all(n in found for n in node.all_input_nodes) and not effects(node) and node not in memory.writes:
            shape, _, dtype, _ = node.meta["tensor"]
            small = math.prod(shape) * dtype.itemsize <= ONCE
            if small and memory.steady(node) and not memory.roots[node] & shown and "empty" not in str(node.target):
                found[node] = None
    return found


def _compute(nodes: dict[fx.Node, None], writer: _Writer) -> None:
    """What these nodes give, as names that the function reads."""
    for node in nodes:
        writer.node(node)
    names = ", ".join(writer.name(n) for n in nodes)
    text = "def once():\n" + "\n".join(writer.lines) + f"\n    return ({names},)"
    exec(compile(text, "<recording>", "exec"), writer.names)
    with below():
        values = writer.names.pop("once")()
    writer.names.update({writer.name(n): v for n, v in zip(nodes, values, strict=True)})
    writer.lines.clear()


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node those that nobody uses after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            used.update(node.all_input_nodes)
            continue
        if node not in used:
            found.setdefault(node, []).append(node)
        for n in [*node.all_input_nodes]:
            if n not in used:
                used.add(n)
                found.setdefault(node, []).append(n)
        used.add(node)
    return found


class _Writer:
    """The text of a function, and the objects that it names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.inputs: list[str] = []
        self._known: dict[Any, str] = {}

    def name(self, node: fx.Node) -> str:
        return f"v_{node.name}"

    def object(self, value: Any, key: Any = None) -> str:
        """A name for an object."""
        key = id(value) if key is None else key
        if key not in self._known:
            self._known[key] = name = f"g{len(self._known)}"
            self.names[name] = value
        return self._known[key]

    def node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.inputs.append(self.name(node))
        elif node.op == "output":
            self.lines.append(f"    return {self.value(tuple(node.args[0]))}")  # type: ignore[arg-type]
        else:
            self.lines.append(f"    {self.name(node)} = {self.call(node)}")

    def run(self, segment: Segment, function: Callable[..., Any]) -> None:
        """A line for nodes that are one function, and those for names of what it gives."""
        results = "".join(f"{self.name(n)}, " for n in segment.outputs)
        self.lines.append(f"    {results}= {self.object(function)}({', '.join(map(self.name, segment.inputs))})")
        for node in segment.views:
            self.node(node)

    def call(self, node: fx.Node) -> str:
        target: Any = node.target
        given = [self.value(a) for a in node.args]
        if target in _INFIX:
            return f"{given[0]} {_INFIX[target]} {given[1]}"
        if target is operator.getitem:
            return f"{given[0]}[{given[1]}]"
        if target is again.message:
            send = again.sender(*node.args[2:], **node.kwargs)  # type: ignore[arg-type]
            return f"{self.object(send)}({given[0]}, {given[1]})"
        named = [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        function = called(node) if isinstance(target, OpOverload) else target
        return f"{self.object(function)}({', '.join(given + named)})"

    def value(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return f"({''.join(self.value(v) + ', ' for v in value)})"
        if kind in (int, bool, str) or value is None:
            return repr(value)
        if kind is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return self.object(value)


# -- torch's functions -----------------------------------------------------------------------------------------------------


def called(node: fx.Node) -> Callable[..., Any]:
    """What to call for an operator: torch's function, if it is seen to do the same, else the operator itself."""
    func: Any = node.target
    plainly = getattr(func, "_op", func)
    key = (func, _kind(node.args), _kind(node.kwargs))
    found = _faster.get(key)
    if found is None:
        found = _faster[key] = next((f for f in _candidates(func) if _same(f, func, node)), plainly)
    return found


_faster: dict[Any, Callable[..., Any]] = {}  # the same on all ranks: functions of the key alone


def _kind(value: Any) -> Any:
    """What of an argument decides which operator a function gives."""
    if isinstance(value, fx.Node):
        facts = value.meta.get("tensor")
        return ("number",) if facts is None else (len(facts[0]), facts[2], facts[3].type)
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((k, _kind(v)) for k, v in value.items())
    return (type(value), value if isinstance(value, bool | str | None) else None)


def _candidates(func: Any) -> list[Callable[..., Any]]:
    name = func._schema.name.removeprefix("aten::")
    if not func._schema.name.startswith("aten::") or torch.Tag.nondeterministic_seeded in func.tags:
        return []
    places = [Tensor] if name.endswith("_") else [torch, Tensor, _torch.functions_of_nn]
    return [f for place in places if callable(f := getattr(place, name, None)) and type(f).__name__ != "function"]


def _same(function: Callable[..., Any], func: Any, node: fx.Node) -> bool:
    """Whether a function gives one call of the operator with the very arguments."""
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _rehearsed)
    except KeyError:
        return False
    seen = _Seen()
    try:
        with below(), seen:
            function(*args, **kwargs)
    except Exception:
        return False
    return len(seen.calls) == 1 and seen.calls[0][0] is func and _alike(seen.calls[0][1:], (args, kwargs), func)


def _alike(seen: Any, given: Any, func: Any) -> bool:
    """Whether two calls give an operator the same, defaults filled in."""
    return _filled(func, *seen) == _filled(func, *given)


def _filled(func: Any, args: Any, kwargs: Any) -> list[Any]:
    declared = func._schema.arguments
    values = {a.name: a.default_value for a in declared}
    values.update(zip((a.name for a in declared), args, strict=False))
    values.update(kwargs)
    return [_comparable(v) for v in values.values()]


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return [_comparable(v) for v in value]
    return (type(value), value)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rehearsed(node: fx.Node) -> Any:
    """A tensor without data like a node's result; a number for a number."""
    if "tensor" not in node.meta:
        return 0.5
    shape, stride, dtype, _ = node.meta["tensor"]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


below = _torch.below_autograd
