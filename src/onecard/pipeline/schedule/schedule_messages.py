"""with_messages: sends and receives for a schedule that only says what is computed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Action, Schedule, received_by
from onecard.pipeline.schedule.flow import input_of
from onecard.pipeline.schedule.timing import Times, simulate


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
    if _left_out.get():
        return schedule
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


_left_out: ContextVar[bool] = ContextVar("_left_out", default=False)


@contextmanager
def computations_alone() -> Iterator[None]:
    """Inside, schedules that are made have no messages: to be simulated, where a result leaves as soon as it is there, too."""
    before = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(before)


def one_order(schedule: Schedule) -> None:
    """Prove that each rank computes with what another one sends it in the order in which it is sent: where messages have no
    tags, and are received where they are needed, one would be taken for another.

    Raises:
        ScheduleError: it is not so.

    Example:
        >>> from onecard.pipeline import interleaved, one_f_one_b
        >>> one_order(one_f_one_b(4, 8))
        >>> one_order(Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B1", "1B0"]], "mine"))
        Traceback (most recent call last):
        onecard.errors.ScheduleError: mine: rank 0 sends 0SEND_F0 first, rank 1 computes with 0SEND_F1 first: ...
    """
    sent: dict[tuple[int, int], list[Action]] = {}
    taken: dict[tuple[int, int], list[Action]] = {}
    homes, last = schedule.stage_to_rank, schedule.num_stages - 1
    for rank, row in enumerate(schedule.compute().ranks):
        for action in row:
            wanted = input_of(action, last)
            if wanted is not None and homes[_giver(*wanted)[0]] != rank:
                stage, send = _giver(*wanted)
                taken.setdefault((homes[stage], rank), []).append(send)
            given = schedule.send_of(action)
            if given is not None:
                sent.setdefault((rank, homes[received_by(given).stage]), []).append(given)
    for (source, target), sends in sent.items():
        for send, other in zip(sends, taken[source, target], strict=True):
            if send != other:
                raise ScheduleError(
                    f"{schedule.name}: rank {source} sends {send} first, rank {target} computes with {other} first: by marks on "
                    "GPUs messages have no tags, and go in one order; 1F1B and ZBH1 do so"
                )


def _giver(what: str, stage: int, microbatch: int) -> tuple[int, Action]:
    """The stage that gives an input, and its send."""
    far = stage - 1 if what == "F" else stage + 1
    return far, Action("SEND_" + what, far, microbatch)
