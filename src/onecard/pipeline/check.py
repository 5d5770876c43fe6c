"""check_schedule: proves that lists of actions run to their end and compute everything once; what they cost. Pure.

The proof takes the strictest way in which messages can work: a send ends only when its receive has begun, and what two ranks
send each other goes in one order. What passes runs on every backend, whether it buffers or not.
"""

from __future__ import annotations

from onecard.errors import ScheduleError
from onecard.pipeline.action import COMPUTE, KINDS, SENDS, Action, Schedule, received_by, sent_by
from onecard.pipeline.memory import Sizes
from onecard.pipeline.report import Report
from onecard.pipeline.timing import Times

Places = dict[Action, tuple[int, int]]  # action -> (rank, position)


def check_schedule(schedule: Schedule, times: Times | None = None, sizes: Sizes | None = None) -> Report:
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
    return Report(schedule, times or Times(), sizes or Sizes())


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
            whole, half, weight = Action("B", stage, i), Action("I", stage, i), Action("W", stage, i)
            if Action("F", stage, i) not in places:
                raise _fault(schedule, f"rank {rank}: {Action('F', stage, i)} is missing")
            if whole in places:
                both = next((a for a in (half, weight) if a in places), None)
                if both:
                    raise _fault(schedule, f"{_at(both, places)} is computed twice: {_at(whole, places)} contains it")
            elif half not in places:
                raise _fault(schedule, f"rank {rank}: {half} is missing" if weight in places else
                                       f"rank {rank}: {whole} is missing (or {half} and {weight})")  # fmt: skip
            elif weight not in places:
                raise _fault(schedule, f"rank {rank}: {weight} is missing, the other half of {half}")


def _told(schedule: Schedule, places: Places) -> None:
    """Every result that another rank wants has its send and its receive; there are no others."""
    if not schedule.has_messages and any(schedule.send_of(a) for row in schedule.ranks for a in row):
        raise _fault(schedule, "no send and no receive is in it; onecard.pipeline.with_messages(schedule) adds them all")
    homes = schedule.stage_to_rank
    wanted = set()
    for action, (rank, position) in places.items():
        send = schedule.send_of(action) if action.kind in COMPUTE else None
        if send is None:
            continue
        for end in (send, received_by(send)):
            home = homes[end.stage]
            if end not in places:
                raise _fault(schedule, f"rank {home}: {end} is missing; {action} (rank {rank}, position {position}) makes what "
                                       f"stage {received_by(send).stage} on rank {homes[received_by(send).stage]} needs")  # fmt: skip
            if places[end][0] != home:
                raise _fault(schedule, f"{_at(end, places)} belongs on rank {home}, where stage {end.stage} is")
            wanted.add(end)
    for action in places:
        if action.kind not in COMPUTE and action not in wanted:
            raise _fault(schedule, f"{_at(action, places)} moves what no other rank computes or wants")


def _needs(action: Action, schedule: Schedule) -> list[Action]:
    """What has to stand before an action on its own rank; where there are ways to write it, each of them."""
    kind, stage, i = action
    last = schedule.num_stages - 1
    if kind == "F":
        return [] if stage == 0 else [Action("RECV_F", stage, i), Action("F", stage - 1, i)]
    if kind == "W":
        return [Action("I", stage, i)]
    if kind in ("B", "I"):
        own = [Action("F", stage, i)]
        after = [Action(kind, stage + 1, i) for kind in ("B", "I")]
        return own if stage == last else own + [Action("RECV_B", stage, i)] + after
    if kind == "SEND_F":
        return [Action("F", stage, i)]
    return [Action("B", stage, i), Action("I", stage, i)] if kind == "SEND_B" else []


def _ordered(schedule: Schedule, places: Places) -> None:
    """On every rank each action comes after what it needs there."""
    for action, (rank, position) in places.items():
        for needed in _needs(action, schedule):
            place = places.get(needed)
            if place and place[0] == rank and place[1] > position:
                raise _fault(schedule, f"{_at(action, places)} needs {needed}, which comes later, at position {place[1]}")


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
    for rank in seen[seen.index(rank) :]:
        action = schedule.ranks[rank][at[rank]]
        other, position = places[_partner(action)]
        words.append(f"{_at(action, places)} waits for {_partner(action)} (rank {other}, position {position})")
    return words


