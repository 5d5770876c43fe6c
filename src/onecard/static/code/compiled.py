"""A graph as a Python function: one line for each node, torch's functions called directly, tensors dropped at their last use.

torch's own functions (``torch.mm``) take half the time of the operators that a graph holds (``aten.mm.default``). One is used in
place of the other only where a call with the same arguments, on tensors without data, has shown that it gives that operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode
from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.static.code.segments import CodeSegment, function_of, segments
from onecard.static.code.source import Code, Source
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.step import RecordedStep

ONCE = 64 * 1024
"""Bytes up to which a tensor that is the same at each call is kept."""

_INFIX = {
    operator.add: "{} + {}", operator.sub: "{} - {}", operator.mul: "{} * {}", operator.truediv: "{} / {}",
    operator.floordiv: "{} // {}", operator.mod: "{} % {}", operator.pow: "{} ** {}", operator.lt: "{} < {}",
    operator.le: "{} <= {}", operator.gt: "{} > {}", operator.ge: "{} >= {}", operator.eq: "{} == {}", operator.ne: "{} != {}",
}  # fmt: skip


def compiled(graph: fx.Graph, backend: str = "eager") -> Callable[..., tuple[Any, ...]]:
    """A function of the graph's inputs that gives its outputs; to be called below autograd (``below``).

    ``backend``: "inductor" compiles what lies between messages (``segments.py``).
    """
    writer = _GraphCode()
    once = _once(graph)
    if once:
        _compute(once, writer)
    last = last_uses(graph)
    runs = _runs(graph, once) if backend == "inductor" else {}
    opened, hidden = False, set[fx.Node]()  # whether a run has begun and not ended; nodes that are no variables
    gone = list[fx.Node]()  # variables to drop as soon as no run is open
    of_line: dict[int, tuple[Any, dict[str, Any]]] = {}
    for node in graph.nodes:
        run, begin = runs.get(node), len(writer.lines)
        if run is None and node not in once:
            writer.node(node)
        elif run is not None and node is run[0].nodes[-1]:
            writer.run(*run)
            hidden |= {*run[0].nodes} - {*run[0].outputs, *run[0].views}
        of_line.update(dict.fromkeys(range(begin, len(writer.lines)), (node.target, node.meta)))
        gone += [n for n in last.get(node, ()) if n not in once]
        opened = opened if run is None else node is not run[0].nodes[-1]
        if not opened:
            if names := [writer.name(n) for n in gone if n not in hidden]:
                writer.lines.append(writer.code("del {}", writer.joined(", ", names)))
            gone = []
    made = writer.function(writer.joined(", ", writer.inputs), writer.lines)
    made.of_line = {line + 2: what for line, what in of_line.items()}  # type: ignore[attr-defined]
    return made


def words_of(target: Any, meta: dict[str, Any]) -> str:
    """Where a node is from: stage and microbatch of a pipeline, operator, line."""
    part, number = meta.get("part"), meta.get("microbatch")
    doing = {"F": "forward", "I": "backward", "W": "backward of the weights"}
    stage = (
        f"stage {part[0]}, {doing[part[1]]} of microbatch {number}: " if part is not None and number is not None else ""
    )
    name = getattr(target, "__name__", str(target)).removesuffix(".default")
    return f"{stage}{name} at {meta.get('line', '')}"


def note_line(fault: BaseException, run: Callable[..., Any] | None) -> None:
    """Add to an error which node of a compiled graph it is from, if it is from one."""
    trace = fault.__traceback__
    while run is not None and trace is not None:
        if trace.tb_frame.f_code is run.__code__:
            what = run.of_line.get(trace.tb_lineno)  # type: ignore[attr-defined]
            fault.add_note(f"in a replay, {words_of(*what) if what else ''}")
            return
        trace = trace.tb_next


def step_function(step: RecordedStep) -> Callable[..., tuple[Any, ...]]:
    """A step's graph as a function, made when it is first asked for."""
    if step._run is None:
        step._run = compiled(step.graph, step.backend)
    return step._run


def _runs(graph: fx.Graph, once: dict[fx.Node, None]) -> dict[fx.Node, tuple[CodeSegment, Any]]:
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
    memory = GraphMemory(graph)
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


def _compute(nodes: dict[fx.Node, None], writer: _GraphCode) -> None:
    """What these nodes give, as names that the function reads."""
    for node in nodes:
        writer.node(node)
    names = writer.joined("", (writer.code("{}, ", writer.name(n)) for n in nodes))
    once = writer.function(writer.code(""), [*writer.lines, writer.code("return ({})", names)])
    with below():
        values = once()
    writer.names.update({writer.name(n): v for n, v in zip(nodes, values, strict=True)})
    writer.lines.clear()


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
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


class _GraphCode(Source):
    """The lines of a function, and the names of nodes in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Code] = []
        self.inputs: list[Code] = []
        self._of: dict[fx.Node, Code] = {}

    def name(self, node: fx.Node) -> Code:
        if node not in self._of:
            self._of[node] = self.variable()
        return self._of[node]

    def node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.inputs.append(self.name(node))
        elif node.op == "output":
            results: Any = node.args[0]
            self.lines.append(self.code("return ({})", self._all(tuple(results))))
        else:
            self.lines.append(self.code("{} = {}", self.name(node), self.call(node)))

    def run(self, segment: CodeSegment, function: Callable[..., Any]) -> None:
        """A line for nodes that are one function, and those for names of what it gives."""
        results, given = self._all(segment.outputs), self._all(segment.inputs)
        self.lines.append(self.code("{}= {}({})", results, self.slot(function), given))
        for node in segment.views:
            self.node(node)

    def call(self, node: fx.Node) -> Code:
        target: Any = node.target
        given = [self.value(a) for a in node.args]
        if target in _INFIX:
            return self.code(_INFIX[target], *given)
        if target is operator.getitem:
            return self.code("{}[{}]", *given)
        if target is again.message:
            send = again.sender(*node.args[2:], **node.kwargs)  # type: ignore[arg-type]
            return self.code("{}({}, {})", self.slot(send), *given[:2])
        function = called(node) if isinstance(target, OpOverload) else target
        positional = self.joined("", (self.code("{}, ", value) for value in given))
        named = self._named(dict(node.kwargs)) if node.kwargs else self.code("")
        return self.code("{}({}{})", self.slot(function), positional, named)

    def _named(self, values: dict[str, Any]) -> Code:
        """Arguments by name; the names are values, too."""
        if not any(map(_nodes, values.values())):
            return self.code("**{}", self.slot({k: _plain(v) for k, v in values.items()}))
        pairs = (self.code("{}: {}", self.slot(k), self.value(v)) for k, v in values.items())
        return self.code("**{{{}}}", self.joined(", ", pairs))

    def value(self, value: Any) -> Code:
        if isinstance(value, fx.Node):
            return self.name(value)
        if not _nodes(value):
            return self.slot(_plain(value))
        return self.code("[{}]" if isinstance(value, list) else "({})", self._all(value))

    def _all(self, values: Sequence[Any]) -> Code:
        return self.joined("", (self.code("{}, ", self.value(v)) for v in values))


def _nodes(value: Any) -> bool:
    """Whether there are nodes in a list or tuple."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return any(map(_nodes, value))
    return isinstance(value, fx.Node)


def _plain(value: Any) -> Any:
    """A constant with lists of Python in place of those of FX."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


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
    seen = _Operators()
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


class _Operators(DispatchMode):
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
