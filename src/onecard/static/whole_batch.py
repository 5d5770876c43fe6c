"""A call of a step that is cut in microbatches, looked at on its whole batch without being done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from onecard._torch.names import tree_unflatten
from onecard.comm.base.record import user_line
from onecard.comm.base.warned import warn
from onecard.errors import OnecardError, RecordingError
from onecard.static.capture.autocast import autocast
from onecard.static.capture.capture import Capture
from onecard.static.capture.questions import Answers, AskedOfWhole, WholeQuestions
from onecard.static.guards.held import HeldValues
from onecard.static.guards.results import apart_as
from onecard.static.passes.additive import Additive
from onecard.static.passes.dependence import MIXED, Doubt, Kind, Verdict
from onecard.static.passes.kept_once import JOINED, note_joined
from onecard.static.passes.late_numbers import CallEntry, listed, set_to_batch
from onecard.static.passes.microbatches import BatchRows, Microbatches, rows_of
from onecard.static.passes.once import words
from onecard.static.passes.options import StaticOptions
from onecard.static.run.bound import BoundRecording
from onecard.static.step.step import MISS, AnyStep
from onecard.tensor.random_operators.draw import by_stage


def calls_of(capture: Capture) -> list[CallEntry]:
    """What a run has called."""
    outside = capture.recorder.outside.items()
    made = {node: x for node, x in outside if isinstance(x, Tensor) and not capture.before.had(x)}
    return listed(capture.recorder.graph, made)


def first_replay(
    name: str, bound: BoundRecording, held: HeldValues, args: Any, kwargs: Any, as_it_is: Callable[[], Any]
) -> Any:
    """What a step in microbatches gives that was just recorded; as it is, where it has changed itself what it reads."""
    if (result := bound.replay(args, kwargs)) is not MISS:
        return result
    warn(
        f"{name}: {bound.seen_differs()}: the step changes what it reads itself, so that no recording of it fits, and this call "
        "runs as it is, on the whole batch",
    )
    held.all_back()
    return as_it_is()


@dataclass(frozen=True)
class WholeBatch:
    """The call, and how it is cut.

    Attributes:
        name: of the step; ``roots``: modules and optimizers that it names.
        asked: what it asks of values of the batch, if that is known.
    """

    name: str
    fn: Any
    leaves: Sequence[Any]
    names: Sequence[str]
    tree: Any
    roots: list[tuple[str, Any]]
    options: StaticOptions
    parts: Microbatches
    asked: WholeQuestions | None = None

    def rows(self) -> BatchRows:
        """How long the results of the whole batch are."""
        return rows_of(tree_unflatten(self.leaves, self.tree), self._look(self.leaves)[0])

    def questions(self) -> WholeQuestions:
        """What the step asks of values of the batch, by a look at all of it.

        Raises:
            RecordingError: what it needs for an answer is not there before it runs.
        """
        answers = AskedOfWhole(self.leaves, self.parts.sketched)
        capture = self._capture(self.leaves, answers)
        self._run(capture)
        if answers.questions and self.parts.avg:
            warn(
                f"{self.name}: avg=True means a loop over microbatches, and {answers.questions[0].line} asks for values of the "
                "batch: the whole batch is asked, and all its microbatches go that way",
            )
        return WholeQuestions(answers.questions, capture)

    def _look(
        self, leaves: Sequence[Any], looker: Additive | None = None, tree: Any = None
    ) -> tuple[Any, list[CallEntry]]:
        """What the step returns, of the whole batch or a part of it, and what it calls. ``tree``: see ``compared``."""
        return self._run(self._capture(leaves, None if self.asked is None else self.asked.again()), looker, tree)

    def _capture(self, leaves: Sequence[Any], answers: Answers | None) -> Capture:
        capture = Capture(leaves, self.names, self.roots, self.options.ask)
        capture.recorder.answers = answers
        return capture

    def _run(self, capture: Capture, looker: Additive | None = None, tree: Any = None) -> tuple[Any, list[CallEntry]]:
        capture.leaves_nothing = capture.recorder.looks = True
        undo = capture.undone(sketched=True)
        if looker is not None:
            looker.joined = partial(capture.recorder.note, JOINED)
        try:
            # A look draws nothing, and how many there are depends on what a rank has.
            with autocast(self.options.dtype, capture.leaves), self.parts.around(), by_stage(), looker or nullcontext():
                result = capture.run(self.fn, self.tree)
            if looker is not None:
                looker.returned(apart_as(result, tree))
            return result, calls_of(capture)
        finally:
            capture.settle()
            undo.back()

    def compared(
        self, first: Additive | None, result: Any, part: Sequence[Any], graph: fx.Graph, tree: Any
    ) -> tuple[Verdict | None, list[CallEntry]]:
        """How the step depends on its rows, by this second look: which of its numbers follow the rows; and what it calls.

        One that is another for the same ``part`` of them, by a third look, follows something else: the check of recordings tells,
        and a last look compares the others.

        ``first``: the look at that part, which gave the ``result``; None: nobody asks how the step depends on rows. ``graph``: of
        that part: what is known of its values is noted there. ``tree``: the form of its results, objects in parts.
        """
        looker = None
        if first is not None:
            looker = Additive(self.leaves, first.returned(apart_as(result, tree)), self.parts.k_steps)
        try:
            _, calls = self._look(self.leaves, looker, tree)
            if looker is None or first is None:
                return None, calls
            if looker.moved:
                fixed = looker.verdict.values  # of one row nobody can tell what has nothing of the batch
                first.verdict.values = {i: v for i, v in first.verdict.values.items() if i in fixed}
                again = Additive(part, first.verdict, 1)
                self._look(part, again, tree)
                if again.moved:  # by something else than rows: which of it follows rows as well, nobody can tell
                    again.forget_strays()
                    looker = Additive(self.leaves, first.verdict, self.parts.k_steps)
                    _, calls = self._look(self.leaves, looker, tree)
        except Exception as fault:  # the step reads values (``ask``), which are not there without data
            if first is not None and not isinstance(fault, RecordingError):
                raise
            return None if first is None else Verdict(open=True) if first.unsure else first.verdict, []
        if calls and self.parts.avg is None:
            other = note_joined(graph, calls[0].node.graph)
            if other is not None:
                why = f"{words(other)} has other dims for a microbatch, and is a sum over something else there"
                looker.verdict.losses.append(Kind(MIXED, where=why))
        return looker.verdict, calls

    def late(
        self, recording: AnyStep, mine: list[CallEntry], whole: list[CallEntry], part: Sequence[Any]
    ) -> list[Doubt]:
        """Give a recording of a ``part`` the batch's numbers where it works on gradients; tells where that cannot be."""
        if not whole:
            return []
        training = not self.parts.sketched
        return [*set_to_batch(recording.graph, mine, whole, lambda: self._look(part)[1], training)]

    def said(self, fault: Exception) -> None:
        """What a microbatch cannot, in the user's numbers, if the step can be looked at again as it is left (a scaler cannot).

        Raises:
            OnecardError: the same refusal, of the whole batch.
            RecordingError: the whole batch can be done: something is as long as that.
        """
        errors = RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError
        try:
            self.rows()
        except OnecardError:
            raise
        except errors:
            return
        if isinstance(fault, errors) and not isinstance(fault, OnecardError):
            inner = fault.__traceback__
            while inner is not None and inner.tb_next is not None:
                inner = inner.tb_next
            where = user_line(inner.tb_frame if inner is not None else None)
            raise RecordingError(
                f"{self.name}: what can be done with the whole batch cannot with one of its {self.parts.k_steps} "
                f"microbatches, at {where}: {type(fault).__name__}: {fault}. Something there is as long as the batch, and is not "
                "cut with it (a state of each row that is carried from batch to batch, a mask or positions that are made "
                "outside), or is cut with it and is none of its rows (an argument that is a table of as many entries). Make it "
                "of the rows at hand (torch.arange(len(x))), give rows as arguments and tables as attributes, or use one "
                "microbatch"
            ) from fault
