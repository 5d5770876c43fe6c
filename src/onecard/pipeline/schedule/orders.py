"""The schedules: how many ranks and microbatches in, the order of every rank's actions out. Pure.

Most are one sequence of forwards and one of backwards, shifted against each other (`_shifted`): the shift is the schedule.
Those that fold the stages into a V are in `schedule_v`, those made from measured times in `schedule_auto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from onecard.pipeline.schedule.action import Action, Schedule, positive
from onecard.pipeline.schedule.schedule_messages import with_messages

Task = tuple[int, int]  # (stage, microbatch)


def _shifted(
    forwards: Sequence[Task], backwards: Sequence[Task], warmup: int, weight_delay: int | None = None
) -> list[Action]:
    """The k-th backward follows the forward number k + warmup; if halved, its W the input gradient k + weight_delay."""
    delay, count, order = weight_delay or 0, len(forwards), []
    halves = ("B",) if weight_delay is None else ("I", "W")
    lanes = [("F", forwards, 0), (halves[0], backwards, warmup)]
    if weight_delay is not None:
        lanes.append(("W", backwards, warmup + delay))
    for tick in range(count + warmup + delay):
        order += [Action(kind, *tasks[tick - lag]) for kind, tasks, lag in lanes if 0 <= tick - lag < count]
    return order


def _tasks(rank: int, microbatches: int) -> list[Task]:
    return [(rank, i) for i in range(microbatches)]


def _schedule(name: str, rows: list[list[Action]]) -> Schedule:
    return with_messages(Schedule.of(rows, name))


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch at a time passes through all stages and back: what moving layers to devices gives.

    Bubble (p - 1) / p. Activations held: 1.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(naive(2, 3)))
        naive: 2 ranks, 3 microbatches, step 18, bubble 50.0%
        0 │F0          B0─── F1          B1─── F2          B2───
        1 │   F0 B0───          F1 B1───          F2 B2───
    """
    positive(ranks=ranks, microbatches=microbatches)
    return _schedule("naive", [_shifted(t, t, 0) for t in (_tasks(r, microbatches) for r in range(ranks))])


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """F-then-B: all forwards, then all backwards.

    Bubble (p - 1) / (m + p - 1). Activations held: m.

    Source: GPipe, Huang et al., arXiv 1811.06965.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(gpipe(2, 3)))
        GPipe: 2 ranks, 3 microbatches, step 12, bubble 25.0%
        0 │F0 F1 F2          B0─── B1─── B2───
        1 │   F0 F1 F2 B0─── B1─── B2───
    """
    positive(ranks=ranks, microbatches=microbatches)
    tasks = [_tasks(rank, microbatches) for rank in range(ranks)]
    return _schedule("GPipe", [_shifted(t, t, microbatches) for t in tasks])


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: after p - 1 - r forwards, rank r alternates one forward and one backward.

    Bubble (p - 1) / (m + p - 1), that of GPipe. Activations held by rank r: min(p - r, m).

    Source: PipeDream-Flush, Narayanan et al., arXiv 2006.09503; DAPPLE, Fan et al., arXiv 2007.01045.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(one_f_one_b(2, 3)))
        1F1B: 2 ranks, 3 microbatches, step 12, bubble 25.0%
        0 │F0 F1       B0─── F2 B1───    B2───
        1 │   F0 B0─── F1 B1─── F2 B2───
    """
    positive(ranks=ranks, microbatches=microbatches)
    tasks = [_tasks(rank, microbatches) for rank in range(ranks)]
    return _schedule("1F1B", [_shifted(t, t, ranks - 1 - r) for r, t in enumerate(tasks)])


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B: twice the forwards ahead, so that messages travel while ranks compute.

    Bubble (p - 1) / (m + p - 1), also where a message takes as long as a forward. Activations held by rank r:
    min(2 (p - r) - 1, m).

    Source: Zhuang et al., arXiv 2211.05322.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(eager_one_f_one_b(2, 3)))
        eager 1F1B: 2 ranks, 3 microbatches, step 12, bubble 25.0%
        0 │F0 F1 F2    B0───    B1───    B2───
        1 │   F0 B0─── F1 B1─── F2 B2───
    """
    positive(ranks=ranks, microbatches=microbatches)
    tasks = [_tasks(rank, microbatches) for rank in range(ranks)]
    return _schedule("eager 1F1B", [_shifted(t, t, 2 * (ranks - 1 - r)) for r, t in enumerate(tasks)])


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1: 1F1B with halved backwards; rank r puts its weight gradients off by r, into what was its bubble at the end.

    Bubble (p - 1) (F + I - W) / (m (F + I + W) + (p - 1) (F + I - W)). Activations held: min(p, m). With more chunks it
    is interleaved likewise.

    Source: Qi et al., arXiv 2401.10241; with chunks, torch's ``ScheduleInterleavedZeroBubble``.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(zb_h1(2, 3)))
        ZB-H1: 2 ranks, 3 microbatches, step 10, bubble 10.0%
        0 │F0 F1    I0 W0 F2 I1 W1 I2 W2
        1 │   F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    rows = []
    for rank, forwards, backwards, ahead in _interleaved(ranks, microbatches, chunks):
        rows.append(_shifted(forwards, backwards, ahead + ranks - 1 - rank, rank))
    return _schedule("ZB-H1" if chunks == 1 else f"ZB-H1 x{chunks}", rows)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: fills the bubble at the start with more forwards; the step becomes a parallelogram without a bubble.

    Bubble 0 if F = I = W and m >= 2 p - 1. Activations held: min(2 p - 1, m).

    Source: Qi et al., arXiv 2401.10241.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(zb_h2(2, 3)))
        ZB-H2: 2 ranks, 3 microbatches, step 9, bubble 0.0%
        0 │F0 F1 F2 I0 W0 I1 W1 I2 W2
        1 │   F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    positive(ranks=ranks, microbatches=microbatches)
    tasks = [_tasks(rank, microbatches) for rank in range(ranks)]
    return _schedule("ZB-H2", [_shifted(t, t, 2 * (ranks - 1 - r), 2 * r) for r, t in enumerate(tasks)])


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: every rank holds several chunks of the layers; rounds of p microbatches pass through each in turn.

    Bubble (p - 1) / (v m + p - 1) if p divides m. Activations of a chunk held by rank 0: min((v + 1) p - 1, v m). Any m:
    rounds are as equal as they can be, and at least p long if m is.

    Source: Narayanan et al., arXiv 2104.04473.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(interleaved(2, 2)))
        interleaved 1F1B x2: 2 ranks, 2 microbatches, step 15, bubble 20.0%
        0 │F0a F1a F0b F1b         B0b────     B1b──── B0a──── B1a────
        1 │    F0a F1a F0b B0b──── F1b B1b──── B0a──── B1a────
    """
    rows = []
    for rank, forwards, backwards, ahead in _interleaved(ranks, microbatches, chunks):
        rows.append(_shifted(forwards, backwards, ahead + 2 * (ranks - 1 - rank)))
    return _schedule(f"interleaved 1F1B x{chunks}", rows)


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth-first: all microbatches through one chunk before the next; each chunk's weights are needed once each way.

    Bubble (p - 1) / (v m + p - 1) if m >= p. Activations of a chunk held: v m.

    Source: Lamy-Poirier, arXiv 2211.05953.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(breadth_first(2, 2)))
        breadth-first x2: 2 ranks, 2 microbatches, step 15, bubble 20.0%
        0 │F0a F1a F0b F1b             B0b──── B1b──── B0a──── B1a────
        1 │    F0a F1a F0b F1b B0b──── B1b──── B0a──── B1a────
    """
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [task for stage in stages for task in _tasks(stage, microbatches)]
        backwards = [task for stage in reversed(stages) for task in _tasks(stage, microbatches)]
        rows.append(_shifted(forwards, backwards, len(forwards)))
    return _schedule(f"breadth-first x{chunks}", rows)


def _interleaved(ranks: int, microbatches: int, chunks: int) -> Iterator[tuple[int, list[Task], list[Task], int]]:
    """For each rank its forwards and backwards by rounds, and how many forwards are ahead of the last rank's backwards."""
    positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = _rounds(ranks, microbatches)
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [(stage, i) for group in rounds for stage in stages for i in group]
        backwards = [(stage, i) for group in rounds for stage in reversed(stages) for i in group]
        yield rank, forwards, backwards, (chunks - 1) * len(rounds[0])


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """The microbatches in max(1, m // p) rounds as equal as they can be, longer ones first."""
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
