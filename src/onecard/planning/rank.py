"""What one rank takes in a step: its stages under the schedule, sums and gathers along dp, memory over time. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from onecard.pipeline.schedule.timing import Span
from onecard.planning.job import PieceCost, RankCost
from onecard.planning.memory import RankMemory
from onecard.planning.stages import StageCost, makes_gradients
from onecard.planning.state import TrainingState


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch in one stage: forward and the halves of backward, with the messages that they wait for."""

    forward: float
    backward_input: float
    backward_weight: float
    messages: dict[str, float]
    compute: float

    def in_one(self) -> StageTime:
        """With the whole backward in I: so is the first stage's, as nothing that it makes crosses back."""
        whole = self.backward_input + self.backward_weight
        return replace(self, backward_input=whole, backward_weight=0.0)


def stage_time(stage: StageCost, state: TrainingState) -> StageTime:
    """What a stage takes, with the gathers of ZeRO-3 that its computation does not hide."""
    runs = stage.runs
    messages: dict[str, float] = defaultdict(float)
    for piece, count in runs:
        for axis, seconds in piece.messages.items():
            messages[axis] += count * seconds
    cuts = {axis: took for axis, (_, took) in stage.at_cuts.items()}
    for axis, seconds in cuts.items():
        messages[axis] += seconds
    forward = sum(count * piece.forward for piece, count in runs) + sum(cuts.values())
    inputs = sum(count * piece.backward_input for piece, count in runs)
    weights = sum(count * (piece.backward_weight + state.accumulate(piece)) for piece, count in runs)
    compute = forward + inputs + weights - sum(messages.values())
    waits = (0.0, 0.0)
    if state.plan.zero >= 3:
        pieces = list(stage.pieces())
        waits = (
            _waits(pieces, state, [p.forward for p in pieces]),
            _waits(pieces[::-1], state, [p.backward for p in pieces[::-1]], True),
        )
        messages["dp"] += sum(waits)
    return StageTime(forward + waits[0], inputs + waits[1], weights, dict(messages), compute)


def _waits(pieces: Sequence[PieceCost], state: TrainingState, seconds: Sequence[float], sums: bool = False) -> float:
    """Seconds in which pieces that are gathered, the next one while one runs, are waited for; in backward gradients go back."""
    line, now, waited = 0.0, 0.0, 0.0
    for i, (piece, computes) in enumerate(zip(pieces, seconds, strict=True)):
        # The next piece is asked for when this one begins; without overlap, when it is needed.
        asked = now if not state.plan.overlap or i == 0 else max(0.0, now - seconds[i - 1])
        took = sum(ranks.seconds(kind, given) for kind, ranks, given in state.gather_messages(piece, False))
        line = max(line, asked) + took
        copied = state.unpacked(piece)
        waited += max(0.0, line - now) + copied
        now = max(now, line) + copied + computes
        if sums:
            took = state.sum_seconds([piece])
            if state.plan.overlap:
                line = max(line, now) + took
            else:
                now += took
                waited += took
    return waited + (max(0.0, line - now) if sums else 0.0)


@dataclass(slots=True)
class RankTime:
    """One place of the pipeline in one step.

    Attributes:
        stages: what it holds, by the stage's number; times: of each.
        spans: its computations under the schedule; received: bytes that each stage is given, as much as it sends back.
        end: of its last computation; sums, gathers, update: seconds of what comes then: sums of gradients, gathers of what is
            updated, as far as nothing hides them, and the optimizer.
    """

    place: int
    stages: dict[int, StageCost]
    times: dict[int, StageTime]
    spans: Sequence[Span]
    state: TrainingState
    received: dict[int, int]
    end: float = field(init=False)
    sums: float = field(init=False)
    late: dict[str, float] = field(init=False)
    gathers: float = field(init=False)
    update: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = max((span.end for span in self.spans), default=0.0)
        self.sums, self.late = self._sums(), self._late()
        self.gathers = self._gathers()
        self.update = sum(count * self.state.update(piece) for piece, count in self._runs())

    def _runs(self) -> Iterator[tuple[PieceCost, int]]:
        for stage in self.stages.values():
            yield from stage.runs

    def _late(self) -> dict[str, float]:
        """Seconds of sums of gradients along other axes than dp, in one message for each."""
        given: Counter[str] = Counter()
        for piece, count in self._runs():
            given.update({axis: count * nbytes for axis, nbytes in piece.pending.items()})
        lines = {axis: self.state.axis(axis) for axis in given}
        return {
            a: line.seconds("all_reduce", given[a] * line.count // (2 * line.count - 2)) for a, line in lines.items()
        }

    def _sums(self) -> float:
        """Seconds that sums of gradients take after backward: they begin as each piece's last gradient is there."""
        if self.state.plan.zero >= 3:
            return 0.0  # in each microbatch
        if not self.state.plan.overlap:
            return self.state.sum_seconds([p for stage in self.stages.values() for p in stage.pieces()])
        ready = sorted(self._ready(), key=lambda pair: pair[0])
        line = 0.0
        beside = 1 - self.state.machine.beside
        for at, took in ready:
            line = max(line, at) + took
        hidden = sum(took for _, took in ready) - max(0.0, line - self.end)
        return max(0.0, line - self.end) + beside * max(0.0, hidden)

    def _ready(self) -> Iterator[tuple[float, float]]:
        """For each piece when its gradients are there, and what their messages take."""
        last: dict[int, Span] = {}
        for span in self.spans:
            number = span.action.stage
            if makes_gradients(span.action) and (number not in last or span.end > last[number].end):
                last[number] = span
        for number, span in last.items():
            pieces = list(self.stages[number].pieces())[::-1]
            whole = sum(p.backward for p in pieces) or 1.0
            now = span.start
            for piece in pieces:
                now += (span.end - span.start) * piece.backward / whole
                yield now, self.state.sum_seconds([piece])

    def _gathers(self) -> float:
        """Seconds in which updated parameters come together that the next step's first forward does not hide."""
        plan = self.state.plan
        if plan.zero not in (1, 2):
            return 0.0
        took = self.state.gather_seconds([p for stage in self.stages.values() for p in stage.pieces()])
        hides = sum(time.forward for time in self.times.values()) if plan.overlap else 0.0
        return max(0.0, took - hides) + (1 - self.state.machine.beside) * min(took, hides)

    # -- what is sent ----------------------------------------------------------------------------------------------------

    def sent(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by axis."""
        plan, found = self.state.plan, Counter[str]()
        for piece, count in self._runs():
            for axis, nbytes in piece.sent.items():
                found[axis] += count * nbytes * plan.microbatches
            for axis, nbytes in piece.pending.items():
                found[axis] += count * nbytes
            often = plan.microbatches if plan.zero >= 3 else 1
            for kind, line, given in self.state.gradient_messages(piece.parameters, piece.experts):
                found["dp"] += count * often * line.sent(kind, given)
            if plan.zero:
                times = count * (2 * plan.microbatches if plan.zero >= 3 else 1)
                for kind, line, given in self.state.gather_messages(piece, plan.zero < 3):
                    found["dp"] += times * line.sent(kind, given)
        last = plan.pp * plan.virtual - 1
        for number, stage in self.stages.items():
            for axis, (nbytes, _) in stage.at_cuts.items():
                found[axis] += plan.microbatches * nbytes
            if plan.pp > 1:
                for nbytes in (stage.output if number < last else 0, self.received.get(number, 0)):
                    part = self.state.sent_on(nbytes)
                    found["pp"] += plan.microbatches * part
                    found["tp"] += plan.microbatches * (plan.tp - 1) * part if part < nbytes else 0
        return {axis: nbytes for axis, nbytes in found.items() if nbytes}

    # -- terms -----------------------------------------------------------------------------------------------------------

    def terms(self, seconds: float, host: float, pipeline_messages: float) -> dict[str, float]:
        """Seconds of the step by what they go to; what is left is the bubble: waits for other ranks."""
        plan = self.state.plan
        found = {"compute": plan.microbatches * sum(time.compute for time in self.times.values())}
        messages: dict[str, float] = defaultdict(float, {"dp": self.sums + self.gathers})
        for axis, took in self.late.items():
            messages[axis] += took
        for time in self.times.values():
            for axis, took in time.messages.items():
                messages[axis] += plan.microbatches * took
        messages["pp"] += pipeline_messages
        for axis in sorted(messages):
            if messages[axis]:
                found[f"messages along {axis!r}"] = messages[axis]
        found["optimizer"] = self.update
        found["host"] = host
        left = seconds - sum(found.values())
        found["bubble"] = left if left > 1e-9 * seconds else 0.0  # the rest of a sum of floats
        if left < 0 and pipeline_messages:  # this rank waits less for messages than the one that waits longest
            found["messages along 'pp'"] += left
        return {name: value for name, value in found.items() if value or name in ("compute", "bubble")}

    def macs(self) -> tuple[int, int]:
        """Multiply-adds of a step, and those of them that are computed again."""
        often = self.state.plan.microbatches
        runs = list(self._runs())
        return often * sum(n * p.macs for p, n in runs), often * sum(n * p.again for p, n in runs)

    def cost(self, name: str, ranks: int, terms: dict[str, float], memory: RankMemory) -> RankCost:
        """All of it as a value."""
        counts: Counter[str] = Counter()
        for piece, count in self._runs():
            counts[piece.name] += count
        return RankCost(
            name, ranks, tuple(counts.items()), terms, self.sent(), memory.at_peak, tuple(memory.over_time), self.macs()[0],
            memory.update,
        )  # fmt: skip
