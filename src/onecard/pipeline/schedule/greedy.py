"""run_greedily: a rank that is free takes the most urgent thing that it can do; weight gradients fill the gaps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from onecard.pipeline.schedule.action import Action
from onecard.pipeline.schedule.schedule_memory import Sizes
from onecard.pipeline.schedule.timing import Times

_NEVER = float("inf")


class _Lanes:
    """What a rank has still to do, and what it holds."""

    def __init__(self, lanes: Iterable[Iterable[Action]], limit: float) -> None:
        self.lanes = [deque(lane) for lane in lanes]
        self.limit, self.held = limit + 1e-9, 0.0
        self.begun = False  # its first backward
        self.owed: deque[Action] = deque()  # weight gradients put off
        self.order: list[Action] = []
        self.start, self.end = _NEVER, 0.0


class _Run:
    """The state of all ranks; `ready` says when an input is there, by the action that wants it."""

    def __init__(self, stages: int, times: Times, sizes: Sizes, hold: float) -> None:
        self.lasts, self.communication, self.hold = times.durations(stages), times.communication, hold
        self.whole, self.late = sizes.kept(stages)
        self.ready: dict[tuple[str, int, int], float] = {}

    def choose(self, rank: _Lanes, now: float) -> tuple[Action | None, float]:
        """What a free rank does now; or None, and until when it waits (for ever: until something is sent)."""
        soonest = _NEVER
        for lane in rank.lanes:
            if not lane:
                continue
            action = kind, stage, _ = lane[0]
            if kind == "F" and rank.held + self.whole[stage] > rank.limit:
                continue
            arrival = now if kind == "F" and stage == 0 else self.ready.get(action, _NEVER)
            held_back = kind == "F" and not rank.begun and soonest - now < self.hold * self.lasts["F"][stage]
            if arrival <= now and not held_back:
                return lane.popleft(), now
            if arrival > now:
                soonest = min(soonest, arrival)
        return (rank.owed.popleft(), now) if rank.owed else (None, soonest)

    def account(self, rank: _Lanes, action: Action, now: float) -> float:
        """What running an action changes on its rank; when it ends."""
        kind, stage, microbatch = action
        end = now + self.lasts[kind][stage]
        rank.order.append(action)
        rank.start, rank.end = min(rank.start, now), end
        if kind == "F":
            rank.held += self.whole[stage]
        elif kind == "I":
            rank.held -= self.whole[stage] - self.late[stage]
            rank.begun = True
            rank.owed.append(Action("W", stage, microbatch))
        else:
            rank.held -= self.late[stage]
        return end


def run_greedily(
    lanes: Sequence[Sequence[Sequence[Action]]],
    stage_to_rank: dict[int, int],
    times: Times,
    sizes: Sizes,
    limits: Sequence[float],
    hold: float = 0.0,
) -> tuple[list[list[Action]], float]:
    """For each rank the order in which it computes, W included, and the longest that a rank takes.

    Args:
        lanes: for each rank, most urgent first, sequences of F and I; each is kept in order.
        stage_to_rank: where each stage is.
        times: how long everything takes.
        sizes: what F keeps, and what of it stays until W.
        limits: for each rank how much it may hold.
        hold: before its first backward a rank starts no F if that backward arrives within this part of an F: late first
            backwards add up along the pipeline.
    """
    stages = len(stage_to_rank)
    run = _Run(stages, times, sizes, hold)
    ranks = [_Lanes(own, limit) for own, limit in zip(lanes, limits, strict=True)]
    queue = [(0.0, rank) for rank in range(len(ranks))]
    parked: set[int] = set()
    while queue:
        now, number = heappop(queue)
        action, until = run.choose(ranks[number], now)
        if action is None:
            if until < _NEVER:
                heappush(queue, (until, number))
            else:
                parked.add(number)
            continue
        end = run.account(ranks[number], action, now)
        heappush(queue, (end, number))
        for wanted in wanted_by_others(action, stages):
            other = stage_to_rank[wanted.stage]
            run.ready[wanted] = end if other == number else end + run.communication
            if other in parked:
                parked.remove(other)
                heappush(queue, (now, other))
    return [rank.order for rank in ranks], max(rank.end - rank.start for rank in ranks)


def wanted_by_others(action: Action, stages: int) -> list[Action]:
    """The next F or I that an F or I makes possible."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage + 1, microbatch) if stage + 1 < stages else Action("I", stage, microbatch)]
    return [Action("I", stage - 1, microbatch)] if kind == "I" and stage else []
