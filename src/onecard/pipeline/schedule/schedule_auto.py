"""Schedules made for measured times and a limit of memory: ZB-1p and ZB-2p. Pure."""

from __future__ import annotations

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Action, Schedule, positive
from onecard.pipeline.schedule.greedy import run_greedily
from onecard.pipeline.schedule.orders import zb_h1, zb_h2
from onecard.pipeline.schedule.schedule_memory import Sizes, peak_memory
from onecard.pipeline.schedule.schedule_messages import with_messages
from onecard.pipeline.schedule.timing import Times, simulate

# How long a rank holds its next forward back for the first backward: shorter is better with few ranks, longer with many.
HOLDS = (0.5, 0.7, 0.9)


def zb_auto(
    ranks: int, microbatches: int, times: Times, limit: float, sizes: Sizes | None = None, name: str = "ZB-auto"
) -> Schedule:
    """The best order found for these times in which no rank holds more than ``limit``.

    Tried are three greedy runs, and ZB-H1 and ZB-H2 where they fit. In the greedy run each rank takes an input
    gradient before a forward, and weight gradients only where it would wait or lacks memory.

    Args:
        ranks: p, with one stage each.
        microbatches: m.
        times: what a stage and a message take; measured ones, in any unit.
        limit: the most that a rank may hold, in the unit of ``sizes``.
        sizes: what F keeps and what of it stays until W; by default one activation, whole until W.
        name: what to call it.

    Raises:
        ScheduleError: a limit below one activation.

    Source: after Qi et al., arXiv 2401.10241, section 3.1; the search is our own.

    Example:
        >>> fast = zb_auto(4, 8, Times(4, 4, 2, 0.1), limit=6)
        >>> max(peak_memory(fast)) <= 6
        True
    """
    positive(ranks=ranks, microbatches=microbatches)
    sizes = sizes or Sizes()
    whole, _ = sizes.kept(ranks)
    if limit < max(whole):
        raise ScheduleError(f"{name}: a limit of {limit:g} holds no microbatch: stage {whole.index(max(whole))} alone keeps "
                            f"{max(whole):g}; give at least that")  # fmt: skip
    lanes = [[[Action(kind, r, i) for i in range(microbatches)] for kind in ("I", "F")] for r in range(ranks)]
    stages = {rank: rank for rank in range(ranks)}
    tried = [run_greedily(lanes, stages, times, sizes, [limit] * ranks, hold) for hold in HOLDS]
    for known in (zb_h1(ranks, microbatches), zb_h2(ranks, microbatches)):
        if max(peak_memory(known, sizes)) <= limit:
            tried.append(([list(row) for row in known.compute().ranks], simulate(known.compute(), times).step))
    rows, _ = min(tried, key=lambda found: found[1])
    return with_messages(Schedule.of(rows, name), times)


def zb_1p(ranks: int, microbatches: int, times: Times | None = None, sizes: Sizes | None = None) -> Schedule:
    """ZB-1p: the best order found with the memory of 1F1B, p activations.

    Bubble: at most that of ZB-H1, for the same times.

    Source: Qi et al., arXiv 2401.10241.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(zb_1p(2, 3)))
        ZB-1p: 2 ranks, 3 microbatches, step 10, bubble 10.0%
        0 │F0 F1    I0 W0 F2 I1 W1 I2 W2
        1 │   F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    positive(ranks=ranks)
    return zb_auto(ranks, microbatches, times or Times(), _activations(ranks, sizes), sizes, "ZB-1p")


def zb_2p(ranks: int, microbatches: int, times: Times | None = None, sizes: Sizes | None = None) -> Schedule:
    """ZB-2p: the best order found with twice the memory of 1F1B, 2 p activations; hardly any bubble if m >= 3 p.

    Bubble: at most that of ZB-H2, for the same times.

    Source: Qi et al., arXiv 2401.10241.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(zb_2p(2, 3)))
        ZB-2p: 2 ranks, 3 microbatches, step 9, bubble 0.0%
        0 │F0 F1 F2 I0 W0 I1 W1 I2 W2
        1 │   F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    positive(ranks=ranks)
    return zb_auto(ranks, microbatches, times or Times(), _activations(2 * ranks, sizes), sizes, "ZB-2p")


def _activations(count: int, sizes: Sizes | None) -> float:
    """What so many of the largest activations weigh."""
    activation = (sizes or Sizes()).activation
    return count * (activation if isinstance(activation, int | float) else max(activation))
