"""Flow: what each action of a schedule waits for and what it gives to whom, as numbers, worked out once. Pure.

A search simulates one schedule with the times of many plans; which action needs which does not depend on times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from onecard.pipeline.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Schedule

LIMIT = 16  # schedules of which it is known
Input = tuple[str, int, int]  # the activation ("F") or gradient ("B") that this stage wants for this microbatch


class Turn(NamedTuple):
    """An action at a place of its rank; ``wanted``, ``given``: the numbers of inputs, -1: none; ``far``: the given one travels.

    Receives have no turn: what comes is there when it is there.
    """

    place: int
    action: Action
    computes: bool
    wanted: int
    given: int
    far: bool


class Flow(NamedTuple):
    """The turns of each rank. An input's number is made of what it is, its stage and its microbatch.

    Attributes:
        rows: of each rank.
        stages, microbatches: how many have numbers.
    """

    rows: tuple[tuple[Turn, ...], ...]
    stages: int
    microbatches: int

    @property
    def numbers(self) -> int:
        """How many there may be."""
        return 2 * self.stages * self.microbatches

    def input(self, number: int) -> Input:
        """What a number stands for."""
        at, microbatch = divmod(number, self.microbatches)
        back, stage = divmod(at, self.stages)
        return "B" if back else "F", stage, microbatch


@lru_cache(LIMIT)
def flow_of(schedule: Schedule) -> Flow:
    """The flow of a schedule.

    Example:
        >>> flow = flow_of(Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]]))
        >>> [(turn.action, turn.wanted, turn.given) for turn in flow.rows[1]], flow.input(1), flow.input(2)
        ([(1F0, 1, -1), (1B0, -1, 2)], ('F', 1, 0), ('B', 0, 0))
    """
    stages = schedule.num_stages
    microbatches = 1 + max((action.microbatch for row in schedule.ranks for action in row), default=-1)
    # All microbatches of a stage want and give alike: it is asked once, of the first one.
    alike: dict[tuple[str, int], tuple[bool, int, int, bool]] = {}
    rows = []
    for row in schedule.ranks:
        turns = []
        for place, action in enumerate(row):
            kind, stage, microbatch = action
            if kind in RECEIVES:
                continue
            if (kind, stage) not in alike:
                wanted, (given, far) = input_of(action, stages - 1), _output(action, schedule)
                at, to = _first(wanted, stages, microbatches), _first(given, stages, microbatches)
                alike[kind, stage] = kind in COMPUTE, at, to, far
            computes, at, to, far = alike[kind, stage]
            takes = at + microbatch if at >= 0 else -1
            gives = to + microbatch if to >= 0 else -1
            turns.append(_turn((place, action, computes, takes, gives, far)))
        rows.append(tuple(turns))
    return Flow(tuple(rows), stages, microbatches)


_turn = Turn._make


def _first(wanted: Input | None, stages: int, microbatches: int) -> int:
    """The number of an input's first microbatch; -1: there is no such stage."""
    if wanted is None or not 0 <= wanted[1] < stages:
        return -1
    return (stages * (wanted[0] == "B") + wanted[1]) * microbatches


def input_of(action: Action, last_stage: int) -> Input | None:
    """What a computation wants of a neighbouring stage."""
    kind, stage, microbatch = action
    if kind == "F":
        return ("F", stage, microbatch) if stage > 0 else None
    if kind == "B" or kind == "I":
        return ("B", stage, microbatch) if stage < last_stage else None
    return None


def _output(action: Action, schedule: Schedule) -> tuple[Input | None, bool]:
    """What an action puts where it is wanted, and whether that is on another rank; where sends are written, they do it."""
    kind, stage, microbatch = action
    if kind == "W":
        return None, False
    forward = kind == "F" or kind == "SEND_F"
    other = stage + 1 if forward else stage - 1
    given = ("F" if forward else "B", other, microbatch)
    if kind in SENDS:
        return given, True
    near = schedule.stage_to_rank.get(other) == schedule.stage_to_rank[stage]
    return (None, False) if schedule.has_messages and not near else (given, not near)
