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
    """The turns of each rank, and the inputs that they name by number."""

    rows: tuple[tuple[Turn, ...], ...]
    inputs: tuple[Input, ...]


@lru_cache(LIMIT)
def flow_of(schedule: Schedule) -> Flow:
    """The flow of a schedule.

    Example:
        >>> flow = flow_of(Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]]))
        >>> [(turn.action, turn.wanted, turn.given) for turn in flow.rows[1]], flow.inputs
        ([(1F0, 0, -1), (1B0, -1, 1)], (('F', 1, 0), ('B', 0, 0)))
    """
    numbers: dict[Input, int] = {}
    last, count = schedule.num_stages - 1, numbers.setdefault
    rows = []
    for row in schedule.ranks:
        turns = []
        for place, action in enumerate(row):
            if action.kind in RECEIVES:
                continue
            wanted, (given, far) = input_of(action, last), _output(action, schedule)
            at = -1 if wanted is None else count(wanted, len(numbers))
            to = -1 if given is None or not 0 <= given[1] <= last else count(given, len(numbers))
            turns.append(_turn((place, action, action.kind in COMPUTE, at, to, far)))
        rows.append(tuple(turns))
    return Flow(tuple(rows), tuple(numbers))


_turn = Turn._make


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
