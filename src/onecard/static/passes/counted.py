"""What each microbatch divides its loss by, computed from a batch alone: when the step is recorded, and at later calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch.names import OpOverload
from onecard.comm.issue import again
from onecard.rules.call import schema_of
from onecard.static.passes.count_chain import NLL
from onecard.static.passes.once import Once, cut
from onecard.static.passes.row_draws import has_rows
from onecard.static.passes.row_linear import makes_alike
from onecard.static.step.memory import effects
from onecard.static.step.nodes import traits
from onecard.static.step.order import draws
from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten
_LITTLE = 1e-3
_ALIKE = ("max", "min", "amax", "amin", "mean", "any", "all")
"""What is of equal microbatches what it is of their batch."""
_PLAIN = (
    "mul", "div", "neg", "abs", "reciprocal", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "add", "sub", "rsub", "to",
    "_to_copy", "copy", "true_divide",
)  # fmt: skip


@dataclass(frozen=True)
class _At:
    """The value of an earlier step."""

    number: int


@dataclass(frozen=True)
class _Part:
    """A microbatch's rows of an argument."""

    leaf: int


@dataclass(frozen=True)
class Count:
    """A value of each microbatch, as a few calls. Messages give what this rank has.

    Attributes:
        steps: a ``_Part``, or (function, args, kwargs); k: how many microbatches; said: what to tell where their values differ.
    """

    steps: tuple[Any, ...]
    k: int
    said: str = ""

    def differs(self, leaves: Sequence[Any]) -> bool:
        """Whether a microbatch of a batch has another one than the first; also if that cannot be told."""
        return bool(self.differing(leaves))

    def differing(self, leaves: Sequence[Any]) -> Tensor | bool:
        """The same, where the values are: nobody waits for them."""
        try:
            first, *others = (self._value(leaves, i) for i in range(self.k))
        except UnknownCount:
            return True
        if any(x.shape != first.shape for x in others):
            return True
        return torch.stack([(x != first).any() for x in others]).any() if others else False

    def _value(self, leaves: Sequence[Any], i: int) -> Tensor:
        values: list[Any] = []
        with torch.no_grad():
            for step in self.steps:
                if isinstance(step, _Part):
                    values.append(self._part(leaves[step.leaf], i))
                else:
                    function, args, kwargs = step
                    try:
                        values.append(function(*_filled(args, values), **_filled(kwargs, values)))
                    except (IndexError, RuntimeError) as fault:  # numbers of rows that no microbatch has
                        raise UnknownCount from fault
        found: Tensor = values[-1]
        return found

    def _part(self, x: Any, i: int) -> Tensor:
        local: Tensor = x._local if isinstance(x, DistTensor) else x
        if local.is_meta:
            raise UnknownCount
        rows = local.shape[0] // self.k
        return local.narrow(0, i * rows, rows).clone()


class UnknownCount(Exception):
    """A value that this rank alone cannot compute."""


class CountFinder:
    """Finds counts in the graph of one microbatch."""

    def __init__(self, graph: fx.Graph, once: Once, k: int) -> None:
        self.order, self.memory, self.k = {n: i for i, n in enumerate(graph.nodes)}, once.memory, k
        self._keys = once.keys

    def of(self, node: Any, at: fx.Node, then: Callable[[Tensor], Tensor] | None = None) -> Count | None:
        """The count that is ``then`` of a node's value, as another one reads it; None if that depends on more than the batch."""
        needed = self._needed(node, at)
        if any(map(has_rows, needed)):  # other numbers for each microbatch, which are not known ahead
            return None
        if any(map(_sums, needed)) and any(
            map(_bends, needed)
        ):  # equal ones of all microbatches say nothing of the batch's
            return None
        number = {n: i for i, n in enumerate(needed)}
        steps = [_step(n, number) for n in needed]
        if None in steps:
            return None
        steps.append((then or _itself, (_At(number[node]),), {}))
        return Count(tuple(steps), self.k)

    def counts(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether the batch, or what is drawn for it, is in a node's value, no parameter is, and no microbatch draws it for
        itself."""
        needed = self._needed(node, at, values=True)
        if not any(cut(n) or has_rows(n) for n in needed):
            return False
        learns = any(n.op == "placeholder" and n.meta["input"].kind == "parameter" for n in needed)
        return not learns and not any(
            draws(n) and n not in self._keys for n in needed
        )  # messages of ranks' shares are part of a count

    def _needed(self, node: fx.Node, at: fx.Node, values: bool = False) -> list[fx.Node]:
        """What a node depends on, as another one reads it, through memory too, in order.

        ``values``: by its values alone: of what ``x.new_zeros(len(x))`` is given, only the shape counts.
        """
        end, found, wanted = self.order[at], set[fx.Node](), [node]
        while wanted:
            if (one := wanted.pop()) not in found:
                found.add(one)
                shape_alone = values and isinstance(one.target, OpOverload) and makes_alike(schema_of(one.target))
                if not shape_alone:
                    wanted += [_labels(one)[0]] if _labels(one) else one.all_input_nodes
                wanted += [n for n in self.memory.writers_to(one) if self.order[n] < end]
        return sorted(found, key=self.order.__getitem__)


def _sums(node: fx.Node) -> bool:
    """Whether a node makes a number of many that is another one of the batch, where those of its microbatches are equal."""
    if _labels(node):
        return True
    if not isinstance(node.target, OpOverload) or "tensor" not in node.meta or node.meta["tensor"][0]:
        return False
    of_many = any("tensor" in n.meta and n.meta["tensor"][0] for n in node.all_input_nodes)
    return of_many and schema_of(node.target).functional not in _ALIKE


def _bends(node: fx.Node) -> bool:
    """Whether a node makes of a sum another number than a multiple of it, or of its inverse. What guards a division by zero
    (``clamp(min=1)``, ``+ 1e-6``) is left aside."""
    sums = [n for n in node.all_input_nodes if "tensor" in n.meta and not n.meta["tensor"][0]]
    if not sums or not isinstance(node.target, OpOverload) or makes_alike(schema := schema_of(node.target)):
        return False
    known = traits(node)
    if schema.functional in ("add", "sub", "rsub") and len(node.args) > 1 and isinstance(node.args[1], int | float):
        return abs(node.args[1]) > _LITTLE
    return known.pointwise and not (known.views or known.copies or schema.functional in _PLAIN)


def _step(node: fx.Node, number: dict[fx.Node, int]) -> Any:
    """A node as data; None of one that is no function of the batch."""
    if cut(node):
        return _Part(node.meta["input"].where[1])
    if labels := _labels(node):
        return not_ignored, (_At(number[labels[0]]), labels[1]), {}
    target: Any = node.target
    given, named = _references(node.args, number), _references(node.kwargs, number)
    if target is again.message:
        return _as_here, given[:2], {}
    return None if node.op != "call_function" or effects(node) else (target, given, named)


def _itself(value: Tensor) -> Tensor:
    return value


def not_ignored(labels: Tensor, ignored: int) -> Tensor:
    """How many labels count."""
    return (labels != ignored).sum()


def _as_here(into: Tensor, given: Tensor) -> Tensor:
    """A message, as if all ranks had what this one has."""
    if into.shape != given.shape:
        raise UnknownCount
    return into.copy_(given)


def _labels(node: fx.Node) -> tuple[Any, ...]:
    """Labels and the ignored one, of a node that says how many torch's loss has counted."""
    loss: Any = node.args[0] if node.target is operator.getitem else None
    counts = loss is not None and loss.target in NLL and node.args[1] == 1 and loss.args[2] is None
    return (loss.args[1], loss.args[4]) if counts else ()


def _references(given: Any, number: dict[fx.Node, int]) -> Any:
    """Operands with nodes as the numbers of their steps."""
    return _mapped(given, lambda x: _At(number[x]) if isinstance(x, fx.Node) else x)


def _filled(given: Any, values: Sequence[Any]) -> Any:
    return _mapped(given, lambda x: values[x.number] if isinstance(x, _At) else x)


def _mapped(given: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(given, list | tuple):
        made = [_mapped(x, function) for x in given]
        return made if isinstance(given, list) else tuple(made)
    if isinstance(given, dict):
        return {name: _mapped(x, function) for name, x in given.items()}
    return function(given)
