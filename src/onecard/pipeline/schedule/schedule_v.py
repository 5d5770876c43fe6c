"""Schedules that fold 2 p stages into a V: rank r holds stage r going down and stage 2 p - 1 - r going up. Pure.

The first and the last stage share rank 0, so the loss is where the input is. Two ways of writing them down:
`_phases`, counts of short patterns, and `_repeated`, one pattern for one microbatch laid over itself again and again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, product

from onecard.errors import ScheduleError
from onecard.pipeline.schedule.action import Action, Schedule, positive
from onecard.pipeline.schedule.greedy import run_greedily
from onecard.pipeline.schedule.schedule_memory import Sizes, peak_memory
from onecard.pipeline.schedule.schedule_messages import with_messages
from onecard.pipeline.schedule.timing import Times

Phases = list[tuple[int, str]]


def _phases(phases: Phases, down: int, up: int, microbatches: int) -> list[Action]:
    """The order that counts of patterns give.

    ``F0 I1 B1`` act on the next microbatch of the chunk going down (0) or up (1); ``W0``, ``W1`` and ``W`` run the oldest
    weight gradient put off on that chunk, or on either, if there is one. Microbatches past the last are left out: what
    remains of an order that can run, can run.
    """
    done: Counter[str] = Counter()
    owed: deque[tuple[str, int]] = deque()
    order = []
    for word in (word for count, pattern in phases for word in pattern.split() * count):
        kind, chunk = word[0], word[1:]
        if kind == "W":
            task = next((t for t in owed if chunk in ("", t[0])), None)
            if task is None:
                continue
            owed.remove(task)
            chunk, microbatch = task
        else:
            counter = chunk if kind == "F" else f"back{chunk}"
            microbatch, done[counter] = done[counter], done[counter] + 1
            if kind == "I":
                owed.append((chunk, microbatch))
        if microbatch < microbatches:
            order.append(Action(kind, up if chunk == "1" else down, microbatch))
    return order


def _v_schedule(name: str, ranks: int, microbatches: int, phases_of: Callable[[int], Phases]) -> Schedule:
    rows = [_phases(phases_of(r), r, 2 * ranks - 1 - r, microbatches) for r in range(ranks)]
    return with_messages(Schedule.of(rows, name))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: no bubble with the memory of 1F1B, the same on every rank.

    Bubble 0 if F = I = W and m >= 2 p - 1. Activations of a chunk held: 2 p, the memory of p whole ones.

    Source: Qi et al., arXiv 2401.10241, section 6.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(zb_v(2, 2)))
        ZB-V: 2 ranks, 2 microbatches, step 14, bubble 14.3%
        0 │F0a F1a     F0b I0b W0b F1b I1b W1b I0a W0a     I1a W1a
        1 │    F0a F0b F1a F1b I0b W0b I0a W0a I1b W1b I1a W1a
    """
    positive(ranks=ranks, microbatches=microbatches)
    total = max(microbatches, 2 * ranks - 1)

    def phases_of(rank: int) -> Phases:
        below = ranks - rank
        return [
            (2 * below - 1, "F0"),
            (rank, "F1 F0"),
            (below, "F1 I1 W1"),
            (total - 2 * ranks + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (below - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (below, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]

    return _v_schedule("ZB-V", ranks, microbatches, phases_of)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe-V: forwards of one chunk beside backwards of the other, each to hide the other's messages.

    Whole backwards where they are paired, halved ones at both ends. Bubble, run one after the other with F = I = W and
    m >= 2 p: (p - 1) / (6 m + p - 1). Activations of a chunk held: min(2 p + 1, 2 m).
    Fewer than 2 p microbatches run as the first of 2 p.

    Source: DeepSeek-V3, arXiv 2412.19437, and its DualPipe repository, in the V form of Qi et al. Here a pair is a forward
    and then a backward; a runtime may run them at once.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(dualpipe_v(2, 2)))
        DualPipe-V: 2 ranks, 2 microbatches, step 15, bubble 20.0%
        0 │F0a F1a     F0b I0b W0b F1b B1b──── B0a────         B1a────
        1 │    F0a F0b F1a F1b B0b──── B0a──── B1b──── B1a────
    """
    positive(ranks=ranks, microbatches=microbatches)
    total = max(microbatches, 2 * ranks)

    def phases_of(rank: int) -> Phases:
        below = ranks - rank - 1
        last = [("B" if i <= rank else "I") + chunk for i, chunk in enumerate("10" * (rank + 1))]
        return [
            (2 * below, "F0"),
            (rank + 1, "F0 F1"),
            (below, "I1 W F1"),
            (total - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (1, " ".join(last)),
            (below, "W I0"),
            (rank + 1, "W"),
        ]

    return _v_schedule("DualPipe-V", ranks, microbatches, phases_of)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half: about half the activations of 1F1B, for a bubble between those of ZB-V and 1F1B.

    If F = I = W and m >= 2 p, the bubble is at most (p - 1) / (2 m + p - 1), half of 1F1B's for many microbatches.
    Activations of a chunk held: at most p + 3, the memory of p / 2 + 1.5 whole ones.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(v_half(2, 2)))
        V-Half: 2 ranks, 2 microbatches, step 15, bubble 20.0%
        0 │F0a         F0b I0b F1a W0b     F1b I1b I0a W1b I1a W0a W1a
        1 │    F0a F0b         I0b F1a F1b I0a W0b I1b I1a W0a W1b W1a
    """
    return _repeated("V-Half", ranks, microbatches, (1, 2, 1, 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min: about a third of the activations of 1F1B, the least that a V can do, for a larger bubble.

    If F = I = W and m >= 2 p, the bubble is at most (4 p - 3) / (6 m + 4 p - 3), two thirds of 1F1B's for many microbatches.
    Activations of a chunk held: at most 2 p / 3 + 3, the memory of p / 3 + 1.5 whole ones.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Example:
        >>> from onecard.pipeline import draw_text
        >>> print(draw_text(v_min(2, 2)))
        V-Min: 2 ranks, 2 microbatches, step 15, bubble 20.0%
        0 │F0a         F0b I0b W0b F1a I0a W0a F1b I1b W1b     I1a W1a
        1 │    F0a F0b         I0b I0a F1a F1b W0b W0a I1b I1a W1b W1a
    """
    return _repeated("V-Min", ranks, microbatches, (1, 1, 1, 1))


def _repeated(name: str, ranks: int, microbatches: int, offsets: tuple[int, int, int, int]) -> Schedule:
    """One microbatch's pattern, again every 6 slots: F down, F up, I down, I up, each stage `offset` slots after the last.

    Longer offsets hold activations longer and let microbatches overlap more. W take the two slots of 6 that are left.
    """
    positive(ranks=ranks, microbatches=microbatches)
    starts = _starts(ranks, offsets)
    rows = []
    for rank in range(ranks):
        slots = _slots(starts, offsets, rank, ranks)
        slots["W1"] = _free(slots, slots["I1"])
        slots["W0"] = _free(slots, slots["I0"])
        order = sorted((slot + _PERIOD * i, word, i) for word, slot in slots.items() for i in range(microbatches))
        rows.append([Action(w[0], 2 * ranks - 1 - rank if w[1] == "1" else rank, i) for _, w, i in order])
    pattern = Schedule.of(rows, name)
    lanes = [[[action for action in row if action.kind != "W"]] for row in pattern.ranks]
    filled, _ = run_greedily(lanes, pattern.stage_to_rank, Times(), Sizes(), peak_memory(pattern))
    return with_messages(Schedule.of(filled, name))


_PERIOD = 6  # F, I and W of two chunks


def _slots(starts: Sequence[int], offsets: Sequence[int], rank: int, ranks: int) -> dict[str, int]:
    places = (rank, ranks - 1 - rank, rank, ranks - 1 - rank)  # of this rank in the passes down, up, down, up
    words = ("F0", "F1", "I1", "I0")
    return {w: s + o * place for w, s, o, place in zip(words, starts, offsets, places, strict=True)}


def _free(slots: dict[str, int], after: int) -> int:
    taken = {slot % _PERIOD for slot in slots.values()}
    return next(slot for slot in range(after + 1, after + 1 + _PERIOD) if slot % _PERIOD not in taken)


def _starts(ranks: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """When the four passes start, as early as can be without two of them on a rank in one slot of the period."""
    hops = [0, *(offset * (ranks - 1) + 1 for offset in offsets[:3])]
    waits = sorted(product(range(_PERIOD), repeat=3), key=sum)
    for wait in waits:
        starts = tuple(accumulate(hop + extra for hop, extra in zip(hops, (0, *wait), strict=True)))
        taken = ({slot % _PERIOD for slot in _slots(starts, offsets, r, ranks).values()} for r in range(ranks))
        if all(len(residues) == 4 for residues in taken):
            return starts
    raise ScheduleError(f"no repeated pattern with offsets {offsets} for {ranks} ranks")
