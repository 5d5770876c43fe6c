"""How many bytes of activations each rank holds at its worst moment, from the order alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Schedule, per_stage


@dataclass(frozen=True)
class Sizes:
    """What a stage keeps and sends for one microbatch, in any unit; one number, or one for each stage.

    Attributes:
        activation: what F keeps for the backward.
        weight: the part of it that stays after I, until W; by default all of it.
        message: what the stage sends to the next (as an activation) and gets back from it (as a gradient).
    """

    activation: float | Sequence[float] = 1.0
    weight: float | Sequence[float] | None = None
    message: float | Sequence[float] = 1.0

    def kept(self, stages: int) -> tuple[list[float], list[float]]:
        """For each stage what F keeps, and what of it stays until W; ScheduleError if that is more."""
        whole = per_stage(self.activation, stages, "activation")
        late = whole if self.weight is None else per_stage(self.weight, stages, "weight")
        for stage, (all_of_it, part) in enumerate(zip(whole, late, strict=True)):
            if part > all_of_it:
                raise ScheduleError(
                    f"stage {stage}: weight={part:g} stays until W, but F keeps only activation={all_of_it:g}; "
                    "weight is a part of activation, as in Sizes(activation=10, weight=4)"
                )
        return whole, late


def peak_memory(schedule: Schedule, sizes: Sizes | None = None) -> list[float]:
    """For each rank the most that it holds at once: F adds a stage's activation, I and W give their parts back, B all.

    With the default sizes it counts activations in flight; a stage's stay until its W.

    Example:
        >>> from onecard.pipeline import gpipe, one_f_one_b
        >>> peak_memory(gpipe(4, 8)), peak_memory(one_f_one_b(4, 8))
        ([8.0, 8.0, 8.0, 8.0], [4.0, 3.0, 2.0, 1.0])
    """
    sizes = sizes or Sizes()
    whole, late = sizes.kept(schedule.num_stages)
    peaks = []
    for row in schedule.ranks:
        held = peak = 0.0
        for kind, stage, _ in row:
            if kind == "F":
                held += whole[stage]
                peak = max(peak, held)
            elif kind == "B":
                held -= whole[stage]
            elif kind == "I":
                held -= whole[stage] - late[stage]
            elif kind == "W":
                held -= late[stage]
        peaks.append(peak)
    return peaks
