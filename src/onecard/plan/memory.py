"""Memory of one rank over a step: what is there all the time, microbatches in flight, gradients as they come. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onecard.pipeline.schedule.timing import Span
from onecard.plan.job import PieceCost
from onecard.plan.stages import StageCost
from onecard.plan.state import TrainingState, size


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """Bytes of one stage: what a microbatch keeps, and the most at once beyond what was there before."""

    kept: int
    forward: tuple[int, int]  # the peak's kept activations, and the rest of it
    first: tuple[int, int, int]  # in backward that makes gradients: activations, gradients of later pieces, the rest
    later: tuple[int, int]
    gradients: int


class RankMemory:
    """Bytes of a rank over a step.

    Attributes:
        at_peak: by what they are.
        over_time: (seconds, bytes).
    """

    def __init__(self, stages: dict[int, StageCost], spans: Sequence[Span], state: TrainingState, last: int) -> None:
        self._state = state
        elements = sum(stage.parameters for stage in stages.values())
        self._always = {
            "parameters": state.parameters(elements),
            "states": state.states(elements),
            "buffers": self._buffers(stages, last),
        }
        self._stages = {number: self._of_stage(stage) for number, stage in stages.items()}
        self._whole = state.gradients(elements)
        self.at_peak: dict[str, int] = {}
        self.over_time: list[tuple[float, int]] = []
        self._walk(spans)

    def _buffers(self, stages: dict[int, StageCost], last: int) -> int:
        """Parameters that are gathered, gradients that are on their way, what comes from other stages."""
        state, plan = self._state, self._state.plan
        sizes = sorted((p.parameters for stage in stages.values() for p, _ in stage.runs), reverse=True)
        largest = sizes[0] if sizes else 0
        gathered = (2 if plan.overlap else 1) * state.gathered(largest)
        sums = largest * size(plan.gradients) if plan.zero >= 2 and state.shards > 1 else 0
        messages = sum(stage.output for number, stage in stages.items() if number < last) if plan.pp > 1 else 0
        return gathered + sums + messages

    def _of_stage(self, stage: StageCost) -> _StageMemory:
        pieces = list(stage.pieces())
        divided = self._state.plan.zero >= 2 and self._state.shards > 1
        kept = 0
        forward, first, later = (0, 0), (0, 0, 0), (0, 0)
        gradients = [self._state.gradients(piece.parameters) for piece in pieces]
        after = sum(gradients)
        for piece, gradient in zip(pieces, gradients, strict=True):
            kept += piece.kept
            after -= gradient
            forward = max(forward, (kept, piece.transient), key=sum)
            wider = 0 if divided else max(0, gradient - piece.gradients)
            first = max(first, (kept, after, piece.first + wider), key=sum)
            later = max(later, (kept, piece.transient + max(piece.tensors, default=0) * self._made(piece)), key=sum)
        return _StageMemory(kept, forward, first, later, sum(gradients))

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
                    gradients += stage.gradients
                    seen.add(number)
            if kind in ("B", "W"):
                held -= stage.kept
                self._point(span.end, held, gradients, 0)
        self._point(max((span.end for span in spans), default=0.0), 0, self._whole, 0)

    def _point(self, seconds: float, activations: int, gradients: int, transient: int) -> None:
        total = sum(self._always.values()) + activations + gradients + transient
        self.over_time.append((seconds, total))
        if total > sum(self.at_peak.values()):
            self.at_peak = {
                **self._always, "gradients": gradients, "activations": activations, "transient": transient,
            }  # fmt: skip
