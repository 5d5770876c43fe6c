"""What a step reads of tensors in Python while it is recorded: known ahead of a replay, asked again at each, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from onecard import recorded
from onecard.comm.base.state import faked
from onecard.static.capture.questions import Answers
from onecard.static.capture.sketch import Sketch
from onecard.static.guards import reads
from onecard.static.guards.numbers import Number
from onecard.static.step import refusals
from onecard.static.step.phases import Phases


class ValueReads(recorded.Listener):
    """The part of a recorder that answers reads of values.

    Attributes:
        reads: what was read, and by which node.
        ask: values of data may be read: they become conditions.
        answers: who gives them instead, where a batch or a part of it is looked at.
        guesses: what modules and hooks read of data is guessed: the recording is only looked at.
    """

    reads: list[tuple[Any, fx.Node]]
    ask: bool
    answers: Answers | None = None
    guesses: bool
    calls: int
    known: set[float]
    tags: list[Number]
    phases: Phases
    sketch: Sketch | None
    node_of: Callable[..., fx.Node]
    _put: Callable[..., fx.Node]
    _given: Callable[[Any], Any]

    def needs_values(self) -> None:
        """An operator's rule looks at values, out of sight of the dispatcher."""
        if self.listens:
            raise refusals.reads_data("how it is divided over the ranks depends on its values")

    def _count(self, func: Any, args: Any) -> None:
        """How many elements its masks take is known before a replay, if they do not depend on data."""
        masks = [(x, self.node_of(x)) for x in reads.masks(func, args)]
        if not masks or any(node.meta["data"] for _, node in masks):
            raise refusals.shape_depends(func)
        for mask, node in masks:
            with self.paused():
                count = reads.chosen_by(mask)
            self.reads.append((count, self._put(reads.chosen_by, (node,), {})))

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What Python is given of tensors; of those that do not depend on data it is known before a replay."""
        given, named = self._given(args), self._given(kwargs)
        data = any(n.meta["data"] for n in given if isinstance(n, fx.Node))
        here = self.phases.here()
        within = here["inside"] or here["phase"] == "backward"  # of backward only hooks are Python
        if self.guesses and (within if data else faked.here):  # without data constants have none
            return reads.guessed(func, args)
        if data and not (self.ask and (self.sketch is None or self.answers is not None)):
            raise refusals.reads_data("its value is read on the host (.item(), bool(), float(), an if, a print)")
        if data and self.answers is not None:
            made = self._put(reads.VALUES[func], given, named)
            made.meta["data"] = data
            return self.answers.answer(self, func, made)
        value = func(*args, **kwargs)
        made = self._put(reads.VALUES[func], given, named)
        made.meta["data"] = data
        self.reads.append((value, made))
        if type(value) is float and not data and self.calls and value not in self.known:
            self.tags = [*self.tags, Number(value, made, self)]  # a tensor, for an operator that takes a number
        return value
