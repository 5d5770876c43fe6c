"""Memory of one rank over a step: what is there all the time, microbatches in flight, gradients as they come. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onecard.pipeline.schedule.timing import Span
from onecard.planning.job import PieceCost
from onecard.planning.stages import StageCost, makes_gradients
from onecard.planning.state import TrainingState, size


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """Bytes of one stage: what a microbatch keeps, and the most at once beyond what was there before."""

    kept: int
    forward: tuple[int, int]  # the peak's kept activations, and the rest of it
    first: tuple[int, int, int]  # in backward that makes gradients: activations, gradients of later pieces, the rest
    later: tuple[int, int]
    gradients: int
    made: int  # of gradients, as backward makes them


class RankMemory:
    """Bytes of a rank over a step.

    Attributes:
        at_peak: by what they are.
        over_time: (seconds, bytes).
        update: while torch's optimizer updates one parameter after the other, all gradients beside it, as it does where a plan
            is laid out in place. A recorded step takes less: what it computes for a parameter is gone before the next. 0 where
            there are stages or microbatches, whose steps are recorded.
    """

    def __init__(self, stages: dict[int, StageCost], spans: Sequence[Span], state: TrainingState, last: int) -> None:
        self._state = state
        # ZeRO-2 and 3 divide gradients as they come if their messages run beside backward, else at the end of each backward.
        divides = state.shards > 1 and state.plan.zero >= 2
        self._divided, self._at_end = divides and state.plan.overlap, divides and not state.plan.overlap
        elements = sum(stage.parameters for stage in stages.values())
        experts = sum(stage.experts for stage in stages.values())
        self._always = {
            "parameters": state.parameters(elements + sum(stage.frozen for stage in stages.values()), experts),
            "states": state.states(elements, experts),
            "buffers": self._buffers(stages, last),
        }
        self._stages = {number: self._of_stage(stage) for number, stage in stages.items()}
        self._costs = stages
        self._held, self._most = sum(self._always.values()), 0
        self.at_peak: dict[str, int] = {}
        self.over_time: list[tuple[float, int]] = []
        self._walk(spans)
        self.update = 0
        if state.plan.pp == 1 and state.plan.microbatches == 1:
            own = self._always["parameters"] + self._always["states"] + state.gradients(elements, experts)
            pieces = [piece for stage in stages.values() for piece, count in stage.runs for _ in range(min(count, 2))]
            batch = sum(piece.batch for piece in pieces) * state.plan.dp  # who calls has all of it
            self.update = own + batch + self._temporaries(pieces)

    def _temporaries(self, pieces: Iterable[PieceCost]) -> int:
        """Bytes that AdamW computes beside: a root and the same divided, and what the parameter before has left."""
        most = before = 0
        for piece in pieces:
            experts = {*piece.expert_tensors}
            for n in piece.tensors:
                now = self._state.updated(n, n if n in experts else 0)
                most, before = max(most, 2 * now + before), now
        return most * size(self._state.plan.states)

    def _buffers(self, stages: dict[int, StageCost], last: int) -> int:
        """Parameters that are gathered, gradients that are on their way, what comes from other stages."""
        state, plan = self._state, self._state.plan
        pieces = [p for stage in stages.values() for p, _ in stage.runs]
        gathered = max(map(state.gathered, pieces), default=0)
        sums = max((p.parameters for p in pieces), default=0) * size(plan.gradients) if self._divided else 0
        messages = sum(stage.output for number, stage in stages.items() if number < last) if plan.pp > 1 else 0
        return gathered + sums + messages

    def _of_stage(self, stage: StageCost) -> _StageMemory:
        pieces = list(stage.pieces())
        kept = 0
        forward, first, later = (0, 0), (0, 0, 0), (0, 0)
        gradients = [piece.gradients if self._at_end else self._of(piece) for piece in pieces]
        after = sum(gradients)
        for piece, gradient in zip(pieces, gradients, strict=True):
            kept += piece.kept
            after -= gradient
            forward = max(forward, (kept, piece.transient), key=sum)
            wider = 0 if self._divided else max(0, gradient - piece.gradients)
            first = max(first, (kept, after, piece.first + wider), key=sum)
            new = after if self._at_end else 0
            later = max(
                later, (kept, new + piece.transient + max(piece.tensors, default=0) * self._made(piece)), key=sum
            )
        stay = sum(map(self._of, pieces))
        return _StageMemory(kept, forward, first, later, stay, sum(piece.gradients for piece in pieces))

    def _of(self, piece: PieceCost) -> int:
        """Bytes of a piece's gradients."""
        return self._state.gradients(piece.parameters, piece.experts)

    @staticmethod
    def _made(piece: PieceCost) -> int:
        """Bytes of an element of a gradient as backward makes it."""
        return piece.gradients // piece.parameters if piece.parameters else 0

    def _walk(self, spans: Sequence[Span]) -> None:
        held = gradients = 0
        seen: set[int] = set()
        for span in sorted(spans, key=lambda s: s.start):
            kind, number, _ = span.action
            stage = self._stages[number]
            if kind == "F":
                self._point(span.end, held + stage.forward[0], gradients, stage.forward[1])
                held += stage.kept
            elif kind in ("B", "I"):
                others = held - stage.kept
                if number in seen:
                    self._point(span.start, others + stage.later[0], gradients, stage.later[1])
                else:
                    new, rest = stage.first[1:]
                    self._point(span.start, others + stage.first[0], gradients + new, rest)
            if makes_gradients(span.action):
                held -= stage.kept
                if self._at_end:  # they are there whole, and once more in buckets, beside parts of earlier ones
                    self._summed(span.end, held, gradients + stage.made, [self._costs[number]])
                gradients += 0 if number in seen else stage.gradients
                seen.add(number)
                self._point(span.end, held, gradients, 0)
        if not self._divided and not self._at_end:
            self._summed(max((span.end for span in spans), default=0.0), 0, gradients, self._costs.values())

    def _summed(self, seconds: float, held: int, gradients: int, stages: Iterable[StageCost]) -> None:
        """Gradients travel in a bucket; nothing is gathered meanwhile."""
        bucket = self._state.bucket([piece for stage in stages for piece in stage.pieces()])
        self._point(seconds, held, gradients, bucket, runs=False)

    def _point(self, seconds: float, activations: int, gradients: int, transient: int, runs: bool = True) -> None:
        always = self._held if runs else self._held - self._always["buffers"]
        now = always + gradients + activations + transient
        self.over_time.append((seconds, now))
        if now > self._most:
            self._most = now
            self.at_peak = {
                **self._always, "gradients": gradients, "activations": activations, "transient": transient,
            } | ({} if runs else {"buffers": 0})  # fmt: skip
