"""check_schedule: proves that lists of actions run to their end and compute everything once; what they cost. Pure.

The proof takes the strictest way in which messages can work: a send ends only when its receive has begun, and what two ranks
send each other goes in one order. What passes runs on every backend, whether it buffers or not.
"""

from __future__ import annotations

from functools import lru_cache

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import COMPUTE, KINDS, SENDS, Action, Schedule, received_by, sent_by
from onecard.pipeline.schedule.schedule_memory import Sizes
from onecard.pipeline.schedule.schedule_report import ScheduleReport
from onecard.pipeline.schedule.timing import Times

KEPT = 32  # schedules that are known to run: one for each number of microbatches in use
# Action -> (rank, position). Plain tuples equal Actions and cost a fraction to make; a check may see a million.
Key = tuple[str, int, int]
Places = dict[Key, tuple[int, int]]


def check_schedule(schedule: Schedule, times: Times | None = None, sizes: Sizes | None = None) -> ScheduleReport:
    """What a schedule costs, after the proof that it can run.

    It can if every stage lies on one rank and does F, and B or else I and W, exactly once for each microbatch; if each
    result that another rank wants has one send and one receive, and no other does; if on every rank all comes after what it
    needs; and if no ranks wait for each other.

    Args:
        schedule: with its sends and receives; of any origin.
        times: what stages and messages take, for the report.
        sizes: what stages keep and send, for the report.

    Raises:
        ScheduleError: it cannot run: the action, its rank and position, and what is missing.

    Example:
        >>> from onecard.pipeline import one_f_one_b
        >>> report = check_schedule(one_f_one_b(4, 8))
        >>> round(report.bubble_rate, 3), report.peak_memory, report.messages
        (0.273, [4.0, 3.0, 2.0, 1.0], 48)
        >>> check_schedule(Schedule.of([["0F0", "0RECV_B0", "0B0", "0SEND_F0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]))
        Traceback (most recent call last):
        onecard.errors.ScheduleError: schedule: the ranks wait for each other: rank 0, position 1: 0RECV_B0 waits for
        1SEND_B0 (rank 1, position 3); rank 1, position 0: 1RECV_F0 waits for 0SEND_F0 (rank 0, position 3)
    """
    places = _places(schedule)
    _complete(schedule, places)
    _told(schedule, places)
    _ordered(schedule, places)
    _meet(schedule, places)
    return ScheduleReport(schedule, times or Times(), sizes or Sizes())


@lru_cache(KEPT)
def prove(schedule: Schedule) -> None:
    """``check_schedule`` for what runs step after step: an equal schedule is proved once.

    Raises:
        ScheduleError: as of ``check_schedule``.
    """
    check_schedule(schedule)


def _fault(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {what}")


def _at(action: Action, places: Places) -> str:
    rank, position = places[action]
    return f"rank {rank}, position {position}: {action}"


def _places(schedule: Schedule) -> Places:
    """Where each action is; each is a known kind, once, and a stage computes on one rank."""
    places: Places = {}
    homes = schedule.stage_to_rank
    for rank, row in enumerate(schedule.ranks):
        for position, action in enumerate(row):
            kind, stage, microbatch = action
            if kind not in KINDS or stage < 0 or microbatch < 0:
                raise _fault(schedule, f"rank {rank}, position {position}: {action} is no action; kinds are {KINDS}")
            if action in places:
                raise _fault(schedule, f"rank {rank}, position {position}: {action} again; it is already "
                                       f"rank {places[action][0]}, position {places[action][1]}")  # fmt: skip
            if kind in COMPUTE and homes[stage] != rank:
                there = next(a for a in schedule.ranks[homes[stage]] if a.kind in COMPUTE and a.stage == stage)
                raise _fault(schedule, f"rank {rank}, position {position}: {action}, but stage {stage} is on "
                                       f"rank {homes[stage]} ({there}); a stage computes on one rank")  # fmt: skip
            places[action] = rank, position
    return places


def _complete(schedule: Schedule, places: Places) -> None:
    """Each stage computes each microbatch once: F, and B or else I and W."""
    if not places:
        raise _fault(schedule, "no rank does anything")
    for stage in range(schedule.num_stages):
        rank = schedule.stage_to_rank.get(stage)
        if rank is None:
            raise _fault(schedule, f"stage {stage} is on no rank: {Action('F', stage, 0)} is missing")
        for i in range(schedule.num_microbatches):
            _computed_once(schedule, places, rank, stage, i)


def _computed_once(schedule: Schedule, places: Places, rank: int, stage: int, i: int) -> None:
    whole, half, weight = (("B", stage, i) in places, ("I", stage, i) in places, ("W", stage, i) in places)
    if ("F", stage, i) in places and whole + half == 1 and half == weight:
        return
    missing = f"rank {rank}: {stage}%s{i} is missing"
    if ("F", stage, i) not in places:
        raise _fault(schedule, missing % "F")
    if whole:
        both = Action("I" if half else "W", stage, i)
        raise _fault(schedule, f"{_at(both, places)} is computed twice: {stage}B{i} contains it")
    if half:
        raise _fault(schedule, missing % "W" + f", the other half of {stage}I{i}")
    raise _fault(schedule, missing % "I" if weight else missing % "B" + f" (or {stage}I{i} and {stage}W{i})")


def _told(schedule: Schedule, places: Places) -> None:
    """Every result that another rank wants has its send and its receive; there are no others."""
    if not schedule.has_messages and any(schedule.send_of(a) for row in schedule.ranks for a in row):
        raise _fault(
            schedule, "no send and no receive is in it; onecard.pipeline.with_messages(schedule) adds them all"
        )
    homes, expected = schedule.stage_to_rank, 0
    for action, (rank, position) in places.items():
        kind, stage, i = action
        if kind == "W" or kind not in COMPUTE:
            continue
        other, letter = (stage + 1, "F") if kind == "F" else (stage - 1, "B")
        if homes.get(other, rank) == rank:
            continue
        expected += 2
        for end, home in ((("SEND_" + letter, stage, i), rank), (("RECV_" + letter, other, i), homes[other])):
            place = places.get(end)
            if place is None:
                raise _fault(schedule, f"rank {home}: {Action(*end)} is missing; {action} (rank {rank}, position {position}) "
                                       f"makes what stage {other} on rank {homes[other]} needs")  # fmt: skip
            if place[0] != home:
                raise _fault(schedule, f"{_at(Action(*end), places)} belongs on rank {home}, where stage {end[1]} is")
    if sum(kind not in COMPUTE for kind, _, _ in places) != expected:
        idle = next(Action(*a) for a in places if a[0] not in COMPUTE and _idle(Action(*a), schedule))
        raise _fault(schedule, f"{_at(idle, places)} moves what no other rank computes or wants")


def _idle(message: Action, schedule: Schedule) -> bool:
    """Whether a message links no two stages on different ranks."""
    homes, stages = schedule.stage_to_rank, (message.stage, _partner(message).stage)
    return message.microbatch >= schedule.num_microbatches or len({homes.get(stage) for stage in stages} - {None}) < 2


def _needs(action: Key) -> tuple[Key, ...]:
    """What has to stand before an action on its own rank; where there are ways to write it, each of them."""
    kind, stage, i = action
    if kind == "F":
        return (("RECV_F", stage, i), ("F", stage - 1, i))
    if kind == "W":
        return (("I", stage, i),)
    if kind == "SEND_F":
        return (("F", stage, i),)
    if kind == "SEND_B":
        return (("B", stage, i), ("I", stage, i))
    if kind == "B" or kind == "I":
        return (("F", stage, i), ("RECV_B", stage, i), ("B", stage + 1, i), ("I", stage + 1, i))
    return ()


def _ordered(schedule: Schedule, places: Places) -> None:
    """On every rank each action comes after what it needs there."""
    for action, (rank, position) in places.items():
        for needed in _needs(action):
            place = places.get(needed)
            if place and place[0] == rank and place[1] > position:
                raise _fault(
                    schedule,
                    f"{_at(Action(*action), places)} needs {Action(*needed)}, which comes later, at position {place[1]}",
                )


def _meet(schedule: Schedule, places: Places) -> None:
    """Run the lists, each send and its receive together: nobody waits for ever."""
    at = [0] * len(schedule.ranks)
    runnable = list(range(len(schedule.ranks)))
    while runnable:
        rank = runnable.pop()
        row = schedule.ranks[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            if action.kind not in COMPUTE:
                other, position = places[_partner(action)]
                if at[other] != position:
                    break
                at[other] += 1
                runnable.append(other)
            at[rank] += 1
    stuck = [rank for rank, row in enumerate(schedule.ranks) if at[rank] < len(row)]
    if stuck:
        raise _fault(schedule, f"the ranks wait for each other: {'; '.join(_circle(schedule, places, at, stuck[0]))}")


def _partner(action: Action) -> Action:
    return received_by(action) if action.kind in SENDS else sent_by(action)


def _circle(schedule: Schedule, places: Places, at: list[int], rank: int) -> list[str]:
    """Who waits for whom, from a stuck rank round to one that was named before."""
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = places[_partner(schedule.ranks[rank][at[rank]])][0]
    words = []
    for member in seen[seen.index(rank) :]:
        action = schedule.ranks[member][at[member]]
        other, position = places[_partner(action)]
        words.append(f"{_at(action, places)} waits for {_partner(action)} (rank {other}, position {position})")
    return words
