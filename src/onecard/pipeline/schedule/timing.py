"""Times, Timeline: when each action runs, by simulation of a schedule or as measured in a run; bubbles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import COMPUTE, Action, Schedule, per_stage
from onecard.pipeline.schedule.flow import flow_of


@dataclass(frozen=True)
class Times:
    """How long a stage computes and a message travels, in any unit; one number, or one for each stage.

    Attributes:
        forward: F.
        backward_input: I, the input-gradient half of a backward; the whole backward B takes I and W.
        backward_weight: W, its weight-gradient half.
        communication: from the end of a stage to the moment that its result is on another rank.

    Example:
        >>> Times(4, 4, 2, 1).per_chunk(2)
        Times(forward=2.0, backward_input=2.0, backward_weight=1.0, communication=1)
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def per_chunk(self, chunks: int) -> Times:
        """The times of stages that hold 1/chunks of the layers: two for each rank take half as long each."""

        def part(value: float | Sequence[float]) -> float | list[float]:
            return value / chunks if isinstance(value, int | float) else [v / chunks for v in value]

        forward, backward_input = part(self.forward), part(self.backward_input)
        return Times(forward, backward_input, part(self.backward_weight), self.communication)

    def durations(self, stages: int) -> dict[str, list[float]]:
        """For each kind of computation the time of each stage."""
        per = {
            "F": per_stage(self.forward, stages, "forward"),
            "I": per_stage(self.backward_input, stages, "backward_input"),
            "W": per_stage(self.backward_weight, stages, "backward_weight"),
        }
        return per | {"B": [i + w for i, w in zip(per["I"], per["W"], strict=True)]}


class Span(NamedTuple):
    """One action of one rank, from when to when."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, simulated or measured.

    Attributes:
        spans: in any order. A measured run gives them as a plain list of (rank, action, start, end).
        name: what to call it in titles.
    """

    spans: tuple[Span, ...]
    name: str = "run"

    @staticmethod
    def of(run: Sequence[tuple[int, Action | str, float, float]], name: str = "measured") -> Timeline:
        """The timeline of a measured run; actions may be given as text.

        Example:
            >>> Timeline.of([(0, "0F0", 0.0, 1.0), (0, "0B0", 1.5, 3.0)]).bubble_rate
            0.16666666666666663
        """
        spans = tuple(Span(r, a if isinstance(a, Action) else Action.parse(a), s, e) for r, a, s, e in run)
        for span in spans:
            if not span.start <= span.end:
                raise ScheduleError(
                    f"rank {span.rank}: {span.action} ends at {span.end}, before its start, {span.start}"
                )
        return Timeline(spans, name)

    @cached_property
    def computing(self) -> tuple[Span, ...]:
        """The spans that compute."""
        return tuple(s for s in self.spans if s.action.kind in COMPUTE)

    @cached_property
    def per_rank(self) -> dict[int, tuple[float, float, float]]:
        """For each rank when its first computation starts, when its last ends, and how long it computes in all."""
        found: dict[int, tuple[float, float, float]] = {}
        for rank, _, start, end in self.computing:
            first, last, busy = found.get(rank, (start, end, 0.0))
            found[rank] = min(first, start), max(last, end), busy + end - start
        return dict(sorted(found.items()))

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any rank."""
        ranks = self.per_rank.values()
        return max((end for _, end, _ in ranks), default=0.0) - min((start for start, _, _ in ranks), default=0.0)

    @property
    def step(self) -> float:
        """The longest that a rank takes from its first start to its last end: a step's cost where steps follow each other
        without a barrier between ranks, as the next step's first forward needs no other rank's last weight gradient."""
        return max((end - start for start, end, _ in self.per_rank.values()), default=0.0)

    def times(self, communication: float = 0.0) -> Times:
        """For each stage the median of what was measured, for `zb_auto` and its kin; a whole backward counts half and half.

        Raises:
            ScheduleError: a stage of which nothing was measured.

        Example:
            >>> run = [(0, "0F0", 0.0, 1.0), (0, "0F1", 1.0, 4.0), (0, "0F2", 4.0, 6.0), (0, "0B0", 6.0, 12.0)]
            >>> Timeline.of(run).times()
            Times(forward=[2.0], backward_input=[3.0], backward_weight=[3.0], communication=0.0)
        """
        found: dict[tuple[str, int], list[float]] = {}
        for span in self.computing:
            found.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
        middle = {key: median(lengths) for key, lengths in found.items()}
        forward, inputs, weights = [], [], []
        for stage in range(1 + max((stage for _, stage in found), default=-1)):
            half = middle.get(("B", stage), 0.0) / 2
            if ("F", stage) not in middle or not ({("B", stage), ("I", stage)} & set(middle)):
                raise ScheduleError(f"{self.name}: no forward and backward of stage {stage} was measured")
            forward.append(middle["F", stage])
            inputs.append(middle.get(("I", stage), half))
            weights.append(middle.get(("W", stage), half))
        return Times(forward, inputs, weights, communication)

    def _idle(self, length: float) -> float:
        busy = sum(busy for _, _, busy in self.per_rank.values())
        return 1 - busy / (length * len(self.per_rank)) if length else 0.0

    @property
    def bubble_rate(self) -> float:
        """The share of `step` that ranks wait: (step - busy) / step, as the zero-bubble papers count it."""
        return self._idle(self.step)

    @property
    def idle_rate(self) -> float:
        """The share of `makespan` that ranks wait: what counts if all ranks wait for each other at the end of a step."""
        return self._idle(self.makespan)


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """When each action runs, if every rank goes through its list and waits only for what an action needs.

    A send does not hold its rank up; a result is on the other rank `communication` after it was sent, and messages do not
    get in each other's way. Without sends in the schedule, results leave when they are there.

    Raises:
        ScheduleError: the ranks would wait for each other for ever; `check` says where.

    Example:
        >>> from onecard.pipeline import gpipe
        >>> timeline = simulate(gpipe(2, 3), Times(1, 1, 1))
        >>> timeline.step, timeline.bubble_rate
        (12.0, 0.25)
    """
    spans: list[Span] = []
    _gone_through(schedule, times or Times(), spans)
    return Timeline(tuple(spans), schedule.name)


def makespan(schedule: Schedule, times: Times) -> float:
    """That of ``simulate``, in half of the time: no span is made.

    Example:
        >>> from onecard.pipeline import gpipe
        >>> makespan(gpipe(2, 3), Times(1, 1, 1))
        12.0
    """
    return _gone_through(schedule, times, None)


def _gone_through(schedule: Schedule, times: Times, spans: list[Span] | None) -> float:
    """From the first start to the last end of a computation; what runs when is put into ``spans``."""
    lasts, delay = times.durations(schedule.num_stages), times.communication
    flow = flow_of(schedule)
    clocks, places = [0.0] * len(flow.rows), [0] * len(flow.rows)
    ready = [-1.0] * flow.numbers  # when each is there
    waiting: dict[int, int] = {}  # the rank that stands still for an input
    first, last = float("inf"), 0.0
    runnable = list(reversed(range(len(flow.rows))))
    while runnable:
        rank = runnable.pop()
        row, clock = flow.rows[rank], clocks[rank]
        for turn in range(places[rank], len(row)):
            _, action, computes, wanted, given, far = row[turn]
            if wanted >= 0 and ready[wanted] < 0:
                waiting[wanted] = rank
                break
            if computes:
                start = max(clock, ready[wanted]) if wanted >= 0 else clock
                clock = start + lasts[action.kind][action.stage]
                first = start if start < first else first
                if spans is not None:
                    spans.append(Span(rank, action, start, clock))
            if given >= 0:
                ready[given] = clock + delay if far else clock
                if given in waiting:
                    runnable.append(waiting.pop(given))
        else:
            turn = len(row)
        clocks[rank], places[rank] = clock, turn
        last = max(last, clock)
    for number, rank in waiting.items():
        what, stage, microbatch = flow.input(number)
        stands = flow.rows[rank][places[rank]]
        raise ScheduleError(
            f"{schedule.name}: rank {rank}, position {stands.place}: {stands.action} waits for "
            f"{'the activation' if what == 'F' else 'the gradient'} of microbatch {microbatch} for stage {stage}, which "
            "never comes; onecard.pipeline.check_schedule says why"
        )
    return last - first if last else 0.0
