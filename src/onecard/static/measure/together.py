"""Ranks that measure at the same time: they meet, each looks at its clock, and all know the mean of what they found."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard.comm.issue import collectives, groups
from onecard.comm.world import world
from onecard.comm.world.pretend import pretending
from onecard.place.mesh import ProcessMesh

Run = Callable[[], Any]
LONG = 0.004
"""Seconds of a turn from which on it says how unevenly ranks compute: below, it says how long they take to meet."""


class RankClock(NamedTuple):
    """Ranks that want each core, and what to read: where several do, a rank's own time, of which each has a share."""

    crowd: float
    now: Callable[[], float]

    def once(self, run: Run) -> float:
        """Seconds of a call that all ranks make at the same time."""
        meet()
        start = self.now()
        run()
        return self.crowd * (self.now() - start)


def together() -> bool:
    """Whether there are other ranks, which measure, too."""
    return world.get_world_size() > 1 and not pretending()


def clock() -> RankClock:
    """The clock to measure by, here."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.get_world_size())) if together() else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks <= cores or torch.get_num_threads() > 1:
        return RankClock(1.0, time.perf_counter)
    return RankClock(ranks / cores, time.process_time)


def meet() -> None:
    """Wait for the other ranks, which measure the same."""
    if together():
        collectives.barrier(_everywhere())


def mean(mine: list[float]) -> list[float]:
    """Of all ranks' numbers."""
    if not together():
        return mine
    total: Tensor = collectives.all_reduce(torch.tensor(mine, dtype=torch.float64, device="cpu"), _everywhere())
    return (total / world.get_world_size()).tolist()


def typical(times: Sequence[float]) -> float:
    """The mean of their middle: a host that is shared has slow and fast moments, and a step some of each.

    Example:
        >>> typical([2.0, 1.0, 1.0, 3.0, 90.0])
        2.0
    """
    least = max(1, len(times) // 10) if len(times) > 2 else 0
    return statistics.fmean(sorted(times)[least : len(times) - least])


@dataclass
class Turns:
    """Calls made in turn, by all ranks at the same time, and how unevenly the ranks got through them."""

    clock: RankClock
    _uneven: list[tuple[float, float]] = field(default_factory=list)

    def run(self, runs: Sequence[Run]) -> list[float]:
        """Each twice; the seconds of one call of each."""
        meet()
        start, found = time.perf_counter(), []
        for run in runs:
            before = self.clock.now()
            run()
            run()
            found.append(self.clock.crowd * (self.clock.now() - before) / 2)
        own = 2 * sum(found)
        meet()
        if own > LONG:
            self._uneven.append((own, time.perf_counter() - start))
        return found

    def uneven(self) -> float:
        """How many times as long as a rank takes on average it takes until all are there."""
        own, until_all = mean([sum(times) for times in zip(*self._uneven, strict=True)] or [0.0, 0.0])
        return max(1.0, until_all / own) if own and together() else 1.0


def _everywhere() -> groups.Group:
    return groups.group(ProcessMesh(range(world.get_world_size()), ["all"]), 0)
