"""What a step asks of the values of its batch, where a part of the batch is written down: all parts go the whole batch's way.

The whole batch is looked at without being done. What the step asks there is computed from the arguments alone, as far as it was
written down by then; a look at a microbatch is given the same answers in their order, and a replay asks again of whole batches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from onecard._torch.fakes import is_fake
from onecard._torch.names import below_autograd
from onecard.comm.base import record
from onecard.static.code.compiled import compiled
from onecard.static.guards.conditions import asked
from onecard.static.step import refusals
from onecard.static.step.step import RecordedStep
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import is_elsewhere
from onecard.train.unmade import is_unmade


class Answers(Protocol):
    """Who answers what is read of data while a step is written down."""

    def answer(self, recorder: Any, func: Any, made: fx.Node) -> Any:
        """The value that the operator ``func``, of the node ``made``, gives to Python."""


@dataclass(frozen=True)
class Question:
    """One value that was read: by which operator, at which line, of which node; and what it was."""

    func: Any
    line: str
    node: fx.Node | None
    value: Any


class AskedOfWhole:
    """Answers in a look at the whole batch.

    Args:
        arguments: the leaves of the arguments.
        alone: whether arguments are all that every rank has of the step, as in a pipeline.
    """

    def __init__(self, arguments: Sequence[Any], alone: bool) -> None:
        self._arguments = {id(_local(x)) for x in arguments if isinstance(x, Tensor)}
        self._alone = alone
        self.questions: list[Question] = []

    def answer(self, recorder: Any, func: Any, made: fx.Node) -> Any:
        """The value, computed of what the look has written down so far.

        Raises:
            RecordingError: it needs more than that: random numbers, gradients, or what not every rank has.
        """
        graph, _ = asked(recorder.graph, [(_itself, (made,), True)])
        assert graph is not None
        values = [*recorder.outside.values()]
        line = record.user_line()
        self._check(graph, values, line)
        with recorder.paused(), below_autograd():
            (value,) = compiled(graph)(*values)
        self.questions.append(Question(func, line, made, value))
        return value

    def _check(self, graph: fx.Graph, values: Sequence[Any], line: str) -> None:
        for node, value in zip(graph.find_nodes(op="placeholder"), values, strict=True):
            absent = isinstance(value, Tensor) and (is_fake(value) or is_elsewhere(value) or is_unmade(value))
            if node.users and absent:
                raise refusals.not_of_batch(line, "this one needs a tensor that has no data here")
            if node.users and self._alone and not (id(value) in self._arguments or _is_constant(node)):
                raise refusals.not_of_batch(
                    line, "this one needs parameters or states, of which each stage has its own"
                )
        late = next((n for n in graph.nodes if n.meta.get("phase") in ("backward", "optimizer") and _computes(n)), None)
        if late is not None:
            raise refusals.not_of_batch(line, "this one is known after backward()")


@dataclass
class GivenAnswers:
    """The answers of the whole batch, in a look at a part of it."""

    questions: Sequence[Question]
    asked: int = 0

    def answer(self, recorder: Any, func: Any, made: fx.Node) -> Any:
        """The value that the same line read of the whole batch.

        Raises:
            RecordingError: it did not.
        """
        line = record.user_line()
        known = self.questions[self.asked] if self.asked < len(self.questions) else None
        if known is None or (known.func, known.line) != (func, line):
            instead = "nothing more" if known is None else f"at {known.line}"
            raise refusals.not_of_batch(line, f"of the whole batch the step asks {instead} in its place")
        self.asked += 1
        return known.value


@dataclass(frozen=True)
class WholeQuestions:
    """What was asked of the whole batch, and the look at it: its recorder, and the places of its numbers."""

    questions: Sequence[Question]
    look: Any

    def kept(self) -> WholeQuestions:
        """The answers alone: a look holds the batch that it was of."""
        return WholeQuestions([replace(q, node=None) for q in self.questions], None)

    def again(self) -> GivenAnswers:
        """For one more look at a part."""
        return GivenAnswers(self.questions)

    def noted(self, step: RecordedStep, part: Any) -> None:
        """Let replays of a step ask the same of whole batches. ``part``: the look that the step was made of.

        Raises:
            RecordingError: a question needs what the step does not know.
        """
        whole = self.look.recorder
        graph, answers = asked(whole.graph, [(operator.eq, (q.node, q.value), True) for q in self.questions])
        if graph is None:
            return
        places = {place: i for i, place in enumerate(_places(part))}
        made, names = fx.Graph(), dict[fx.Node, fx.Node]()
        given = [made.node_copy(node) for node in step.graph.find_nodes(op="placeholder")]
        before: tuple[fx.Node, ...] = ()
        if step.conditions is not None:
            names.update(zip(step.conditions.find_nodes(op="placeholder"), given, strict=True))
            before = _copied(step.conditions, made, names)
        for node, place in zip(graph.find_nodes(op="placeholder"), _places(self.look), strict=True):
            if place in places:
                names[node] = given[places[place]]
            elif node.users:
                line = self.questions[0].line
                raise refusals.not_of_batch(
                    line, "this one needs a tensor of the program that a microbatch does not meet"
                )
        step.conditions = made
        step.answers = (*step.answers, *answers)
        made.output((*before, *_copied(graph, made, names)))


def _copied(graph: fx.Graph, into: fx.Graph, names: dict[fx.Node, fx.Node]) -> tuple[fx.Node, ...]:
    """Copy what computes; the outputs."""
    for node in graph.nodes:
        if node.op == "call_function":
            names[node] = into.node_copy(node, names.__getitem__)
    (output,) = graph.find_nodes(op="output")
    found: Any = fx.map_arg(output.args[0], names.__getitem__)
    return tuple(found)


def _places(look: Any) -> Iterator[Any]:
    """What stands behind each input of a look, in words that are the same for looks at other rows of the same step."""
    arguments = {id(_local(x)): ("argument", i) for i, x in enumerate(look.leaves) if isinstance(x, Tensor)}
    constants = dict[Any, int]()
    for node, value in look.recorder.outside.items():
        if id(value) in arguments:
            yield arguments[id(value)]
        elif node in look.numbers:
            yield tuple(map(_identity, look.numbers[node]))
        elif isinstance(value, Tensor) and not look.before.had(value):
            what = "constant", str(value.dtype), tuple(value.shape), repr(value.tolist())
            constants[what] = constants.get(what, 0) + 1
            yield *what, constants[what]
        else:
            yield id(value)


def _identity(x: Any) -> Any:
    return x if isinstance(x, str | int | None) else id(x)


def _local(x: Tensor) -> Tensor:
    return x._local if isinstance(x, DistTensor) else x


def _is_constant(node: fx.Node) -> bool:
    """Whether an input is a tensor that the step makes of Python's values, or a number."""
    return node.meta.get("data") is False


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not torch.ops.aten.clone.default


def _itself(value: Any) -> Any:
    return value
