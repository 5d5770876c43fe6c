"""What one recorded step called, in order, as it was before any pass: what a later run of the step is held against."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from onecard import recorded
from onecard._torch import names as _torch
from onecard.comm.issue import again
from onecard.static.guards import reads
from onecard.static.step.nodes import operator_of
from onecard.static.step.step import Effect, RecordedStep, Where


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand that another entry, or an input, gives."""

    number: int


@dataclass(slots=True)
class ScriptEntry:
    """One call.

    Attributes:
        number: of its node; ``parts``: those of the parts of its result, with which part it is.
        target: what the dispatcher sees: an operator, a message, a function of ours. ``computes``: arithmetic of numbers.
        args, kwargs: constants, and ``Ref``s.
        named: its result is a new tensor, or a key; ``gives_value``: a number for Python.
        constant: the tensor that it copies, if Python made that of values.
        line: the user's; ``module``: where in the model.
    """

    number: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool
    parts: tuple[tuple[int, int], ...]
    gives_value: bool
    computes: bool
    constant: Tensor | None
    line: str
    module: str


class StepScript:
    """The entries of a recording, and what is to come out of them.

    Attributes:
        inputs: the numbers of the graph's inputs, in order; ``outputs``: of its outputs.
        rows: whether rows could come up in it.
    """

    def __init__(self, graph: fx.Graph, outside: dict[fx.Node, Any], rows: bool = False) -> None:
        self.rows = rows
        numbers = {node: i for i, node in enumerate(graph.nodes)}
        self.inputs = [numbers[node] for node in outside]
        self._names: dict[int, str] = {}
        self._constants = {numbers[node]: value for node, value in outside.items() if isinstance(value, Tensor)}
        parts: dict[fx.Node, list[tuple[int, int]]] = {}
        self.entries: list[ScriptEntry] = []
        for node in graph.nodes:
            if node.op == "output":
                self.outputs = [numbers[n] for n in node.args[0]]
            elif node.op != "call_function" or node.target is reads.chosen_by:
                continue
            elif node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_named(node):
                parts.setdefault(node.args[0], []).append((node.args[1], numbers[node]))
            else:
                self.entries.append(_entry(node, numbers))
        by_number = {numbers[node]: tuple(found) for node, found in parts.items()}
        for entry in self.entries:
            entry.parts = by_number.get(entry.number, ())

    def of(self, recording: RecordedStep) -> StepScript:
        """The same, with what the step returns and leaves in the program."""
        self.results, self.tree = recording.results, recording.tree
        self.effects: Sequence[Effect] = recording.effects
        self.gradients: Sequence[tuple[Where, bool]] = recording.gradients
        self._names = {i: known.name for i, known in zip(self.inputs, recording.inputs, strict=True)}
        constants = {i for i, known in zip(self.inputs, recording.inputs, strict=True) if known.kind == "constant"}
        for entry in self.entries:
            if entry.target is torch.ops.aten.clone.default and entry.args[0].number in constants:
                with _torch.no_fakes():  # a number that the step writes into a tensor without data has some itself
                    entry.constant = self._constants[entry.args[0].number].detach().clone()
        del self._constants
        return self

    def name_of(self, expected: Any) -> str:
        """What an operand is, for people."""
        if not isinstance(expected, Ref):
            return repr(expected)
        if expected.number in self._names:
            return self._names[expected.number]
        made = next((e for e in self.entries if e.number == expected.number), None)
        return f"the result of {made.target} at {made.line}" if made is not None else "a part of another result"


def operators_of(target: Any) -> Any:
    """What the dispatcher sees where a node has this target."""
    return _READ.get(target, target)


_READ = {reader: func for func, reader in reads.VALUES.items()}
_READERS = frozenset(map(id, _READ))  # torch hashes an operator in Python, at each look


def _entry(node: fx.Node, numbers: dict[fx.Node, int]) -> ScriptEntry:
    target: Any = node.target
    is_operator = operator_of(node) is not None
    gives_value = id(target) in _READERS
    is_call = is_operator or target is again.message or gives_value or target in recorded.writes
    named = _is_named(node) if is_call and not is_operator else "tensor" in node.meta
    return ScriptEntry(
        numbers[node], operators_of(target) if gives_value else target, tuple(_told(x, numbers) for x in node.args),
        {k: _told(v, numbers) for k, v in node.kwargs.items()}, named, (), gives_value, not is_call, None,
        node.meta.get("line", ""), node.meta.get("module", ""),
    )  # fmt: skip


def _is_named(node: fx.Node) -> bool:
    """Whether what a node gives is known by its identity: a tensor, a key, rows."""
    return "tensor" in node.meta or "key" in node.meta


def _told(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """A constant, or where it comes from."""
    if isinstance(value, fx.Node):
        return Ref(numbers[value])
    if isinstance(value, again.Line):
        return value
    if isinstance(value, list | tuple):
        return [_told(v, numbers) for v in value]
    if isinstance(value, dict):
        return {k: _told(v, numbers) for k, v in value.items()}
    return value
