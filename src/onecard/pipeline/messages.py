"""with_messages: sends and receives for a schedule that only says what is computed. Pure."""

from __future__ import annotations

from onecard.pipeline.action import Action, Schedule, received_by
from onecard.pipeline.timing import Times, simulate


def with_messages(schedule: Schedule, times: Times | None = None) -> Schedule:
    """The schedule with every send and receive that its computations need, in an order that cannot deadlock.

    A result is sent as soon as it is there, and its receive is put where the other rank is at that moment, for the given
    times. So both ends keep one order of all messages in the pipeline, and it runs to its end even where each send waits
    for its receive.

    Raises:
        ScheduleError: the computations wait for each other for ever.

    Example:
        >>> with_messages(Schedule.of([["0F0", "0B0"], ["1F0", "1B0"]])).ranks
        ((0F0, 0SEND_F0, 0RECV_B0, 0B0), (1RECV_F0, 1F0, 1B0, 1SEND_B0))
    """
    schedule = schedule.compute()
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    # The sort is stable and `simulate` lists causes first: so they stay first where times are equal.
    for rank, action, _, _ in sorted(simulate(schedule, times).spans, key=lambda span: span.end):
        rows[rank].append(action)
        send = schedule.send_of(action)
        if send:
            receive = received_by(send)
            rows[rank].append(send)
            rows[schedule.stage_to_rank[receive.stage]].append(receive)
    return Schedule(tuple(tuple(row) for row in rows), schedule.name)
