"""Runtime, Walk: what every pipeline of this process runs in, whatever its stages are: one rank's row of actions, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from onecard.comm.world import world
from onecard.errors import CommunicationError, ScheduleError
from onecard.pipeline.run.meter import Meter
from onecard.pipeline.run.packets import batch_size, split
from onecard.pipeline.schedule.action import Action, Schedule
from onecard.pipeline.schedule.check import prove
from onecard.pipeline.schedule.timing import Timeline


class Runtime:
    """What lasts from step to step: what is measured, and whether a step ended in the middle.

    Args:
        place: of this rank in the pipeline's order; ``places``: how many there are.
        stages: those that this rank has.
    """

    def __init__(self, place: int, places: int, stages: Sequence[int]) -> None:
        self.place, self.places, self.mine = place, places, sorted(stages)
        self.meter: Meter | None = None
        """Where one is set, what each stage keeps for its backward is counted."""
        self.spans: list[tuple[int, Action, float, float]] = []
        """When each computation of the last step began and ended, in seconds of this host's clock."""
        self._failed = ""

    def fit(self, schedule: Schedule) -> None:
        """Prove a schedule, once, and that it means these ranks and stages."""
        if self.places > 1 and self._failed:
            raise CommunicationError(
                "a step of this pipeline ended in the middle, and messages of it may be under way, which the next would take "
                f"for its own: end the program on all ranks and go on from a checkpoint. It was: {self._failed}"
            )
        prove(schedule)
        if len(schedule.ranks) != self.places:
            raise ScheduleError(f"{schedule.name} is for {len(schedule.ranks)} ranks, this pipeline has {self.places}")
        mine = [stage for stage, rank in schedule.stage_to_rank.items() if rank == self.place]
        if sorted(mine) != self.mine:
            raise ScheduleError(
                f"{schedule.name} has stages {sorted(mine)} on place {self.place} of the pipeline (rank "
                f"{world.get_rank()}), which holds {self.mine}: make the layers' stages from this schedule's "
                "stage_to_rank"
            )

    def failed(self, what: str) -> None:
        """A step ended in the middle: what is under way would be taken for the next one's."""
        self._failed = what or "interrupted"

    def timeline(self, name: str = "measured") -> Timeline:
        """What this rank computed in its last step, and when; join those of all ranks for the whole.

        On a GPU these are the times at which the host had issued the kernels.
        """
        return Timeline.of(self.spans, name)


class Walk:
    """One step: this rank's row, action by action; each kind has a function that does it.

    Args:
        runtime: whose step it is.
        schedule: of which the row is this rank's; the whole is asked for its sizes.
        inputs: the whole batch.
        sizes: of the microbatches; as equal as can be if left out.

    Raises:
        ScheduleError: a batch that does not divide.
    """

    do: Mapping[str, Callable[[int, Action], None]]

    def __init__(
        self, runtime: Runtime, schedule: Schedule, row: Sequence[Action], inputs: Any, sizes: Sequence[int] | None
    ) -> None:
        self.runtime, self.schedule, self.row = runtime, schedule, row
        self.last = schedule.num_stages - 1
        count, size = schedule.num_microbatches, batch_size(inputs)
        self.sizes = list(sizes) if sizes is not None else _even(size, count)
        if len(self.sizes) != count or sum(self.sizes) != size or min(self.sizes) < 1:
            raise ScheduleError(
                f"{schedule.name} has {count} microbatches, but a batch of {size} is to be cut into {self.sizes}: give a "
                "schedule for as many as there are, each of 1 sample or more"
            )
        self.inputs = split(inputs, self.sizes, "the inputs")

    def go_through(self) -> None:
        """Do everything."""
        self.runtime.spans = []
        try:
            for position, action in enumerate(self.row):
                self.do[action.kind](position, action)
            self.finish()
        except BaseException as fault:
            self.runtime.failed(f"{type(fault).__name__}: {fault}")
            raise

    def finish(self) -> None:
        """What is left when all actions are done."""

    def counted(self, stage: int) -> AbstractContextManager[None]:
        """Around a stage's forward: what it keeps is counted, if anybody asked."""
        meter = self.runtime.meter
        return nullcontext() if meter is None else meter.forward(stage)

    def note(self, action: Action, begin: float) -> None:
        """An action that began then has ended."""
        self.runtime.spans.append((self.runtime.place, action, begin, time.perf_counter()))


def _even(size: int, count: int) -> list[int]:
    """As equal as can be, longer ones first."""
    return [size // count + (i < size % count) for i in range(count)]
