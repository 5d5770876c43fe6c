"""ScheduleReport: what a schedule costs, for given times and sizes. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from onecard.pipeline.schedule.action import SENDS, Schedule, per_stage, received_by
from onecard.pipeline.schedule.schedule_memory import Sizes, peak_memory
from onecard.pipeline.schedule.timing import Timeline, Times, simulate


@dataclass(frozen=True)
class ScheduleReport:
    """What a schedule costs; print it for one line. Everything is computed when it is asked for.

    Attributes:
        schedule: the schedule, which has been proved.
        times: what stages and messages take.
        sizes: what stages keep and send.
    """

    schedule: Schedule
    times: Times
    sizes: Sizes

    @cached_property
    def timeline(self) -> Timeline:
        """When each action runs."""
        return simulate(self.schedule, self.times)

    @property
    def step(self) -> float:
        """How long a step takes: `Timeline.step`."""
        return self.timeline.step

    @property
    def bubble_rate(self) -> float:
        """The share of a step that ranks wait: `Timeline.bubble_rate`."""
        return self.timeline.bubble_rate

    @cached_property
    def peak_memory(self) -> list[float]:
        """For each rank the most that it holds of activations at once."""
        return peak_memory(self.schedule, self.sizes)

    @cached_property
    def _links(self) -> Counter[tuple[int, int, int]]:
        """(from rank, to rank, stage whose output or its gradient it is) -> messages."""
        homes, links = self.schedule.stage_to_rank, Counter[tuple[int, int, int]]()
        for rank, row in enumerate(self.schedule.ranks):
            for action in row:
                if action.kind in SENDS:
                    other = received_by(action).stage
                    links[rank, homes[other], min(action.stage, other)] += 1
        return links

    @property
    def messages(self) -> int:
        """How many messages are sent in a step."""
        return self._links.total()

    @property
    def message_bytes(self) -> float:
        """What they weigh together, in the unit of `sizes.message`."""
        sizes = per_stage(self.sizes.message, self.schedule.num_stages, "message")
        return sum(count * sizes[stage] for (_, _, stage), count in self._links.items())

    def links(self) -> dict[tuple[int, int], int]:
        """For each pair (from rank, to rank) how many messages go there in a step."""
        found: Counter[tuple[int, int]] = Counter()
        for (source, target, _), count in self._links.items():
            found[source, target] += count
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        return (
            f"{self.schedule.name}: {len(self.schedule.ranks)} ranks, {self.schedule.num_microbatches} microbatches: "
            f"step {self.step:.6g}, bubble {self.bubble_rate:.2%}, peak memory {max(self.peak_memory):.6g}, "
            f"{self.messages} messages of {self.message_bytes:.6g} in all"
        )
