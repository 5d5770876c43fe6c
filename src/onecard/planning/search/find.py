"""The best plan, by branch and bound: plans are priced in the order of what they take at least, until no other can be better."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from onecard.errors import PlanError, ScheduleError
from onecard.machine.cost import Machine
from onecard.planning.job import JobCost, PieceCost
from onecard.planning.plan import Plan
from onecard.planning.price import composed, on_hosts
from onecard.planning.search.bounds import Bounds, always_kept, divided
from onecard.planning.search.space import Space
from onecard.planning.state import TrainingState

ALIKE = 0.005
"""Share of a step by which two plans are no different: the one that divides less is taken."""


_FEW = 6
"""Of microbatches for each stage: a pipeline with more is first looked at with two and three."""
_STEADY = 0.998
"""A step is at least as long as a line through few microbatches says, as the longest way through it is convex in their number;
a schedule that is made anew for each number (VMin) may take 0.12 % less."""


@dataclass(slots=True)
class Searched:
    """What a search has seen.

    Attributes:
        priced: the plans that were priced, with their costs.
        looked: how many plans there were; recorded: of how many recordings.
    """

    priced: list[JobCost] = field(default_factory=list)
    looked: int = 0
    recorded: int = 0


class Search:
    """Plans of a space on a machine, with so many bytes of memory on each rank (0: any).

    Example:
        >>> import onecard as oc
        >>> from onecard.planning.search.subject import subject_of
        >>> sizes = oc.Transformer(layers=4, hidden=256, heads=8, vocab=1024, sequence=128)
        >>> machine = oc.Machine.preset("A100")
        >>> search = Search(Space(subject_of(sizes, 4, None, {}), 2, machine, {"tp": 1}), machine, 0)
        >>> best = search.run().priced
        >>> min(cost.seconds for cost in best) == min(cost.seconds for cost in search.everything())
        True
    """

    def __init__(self, space: Space, machine: Machine, limit: int, objective: str = "time") -> None:
        self.space, self.machine, self.limit, self.objective = space, machine, limit, objective
        self._open: dict[Plan, tuple[Bounds, int]] = {}
        self._fitting: set[Plan] = set()
        self._guessed: dict[tuple[Plan, Plan], float] = {}
        # What this search has asked for, whether it was known before or not: so it goes the same way again.
        self._seen: set[Any] = set()
        self._again: set[Plan] = set()  # groups whose plans are looked at with recomputation, too

    # -- one plan --------------------------------------------------------------------------------------------------------

    def opened(self, group: Plan) -> tuple[Bounds, int]:
        """The pieces of a group: recorded when it is asked for first."""
        if group not in self._open:
            machine = on_hosts(self.machine, group.per_host)
            pieces, tokens = self.space.subject.pieces(group, machine)
            other: Sequence[PieceCost] = pieces
            if group.recompute != "none":
                other, _ = self.space.subject.pieces(replace(group, recompute="none"), machine)
            self._open[group] = Bounds(pieces, other, machine), tokens
            self._seen.add(self.space.subject.key(group))
        return self._open[group]

    def cost(self, group: Plan, plan: Plan) -> JobCost:
        """What a plan of a group takes."""
        bounds, tokens = self.opened(group)
        return composed(plan, bounds.machine, bounds.pieces, bounds.other, tokens)

    def members(self, group: Plan) -> Iterator[Plan]:
        """The plans of a group, pipelines also with stages that are cut where they take the same time."""
        for plan in self.space.members(group):
            yield plan
            if plan.pp > 1 and "stages" not in self.space.fixed and not plan.recompute_blocks:
                with suppress(PlanError):
                    even = self.opened(group)[0].balanced(plan)
                    if even:
                        yield replace(plan, stages=even)

    def everything(self) -> Iterator[JobCost]:
        """Every plan priced, as no search does it: to compare with."""
        for first in list(self.space.groups()):
            for group in self._all(first):
                for plan in list(self.members(group)):
                    with suppress(PlanError, ScheduleError):
                        cost = self.cost(group, plan)
                        if self._fits(cost.needs):
                            yield cost

    def _all(self, group: Plan) -> Iterator[Plan]:
        yield group
        for other in self.space.again(group):
            yield from self._all(other)

    # -- the search ------------------------------------------------------------------------------------------------------

    def run(self) -> Searched:
        """Price what can be the best."""
        found, queue, best = Searched(), _Queue(), float("inf")
        for group in self.space.groups():
            if not self._too_large(group):
                queue.put(0.0, _Entry(group))
        while queue and queue.least <= best * (1 + ALIKE):
            bound, entry = queue.take()
            group, plan = entry.group, entry.plan
            if plan is None:
                least = self._at_least(group)
                if least > bound:
                    queue.put(least, entry)
                    continue
                found.recorded += 1
                self._open_all(group, found, queue)
                continue
            least, sure, fits = self._closer(entry, bound)
            if not fits:
                self._with_recompute(group, least, queue)
                continue
            if least > bound * (1 + 1e-9):
                queue.put(least, replace(entry, sure=sure))
                continue
            with suppress(PlanError, ScheduleError):
                cost = self.cost(group, plan)
                if self._fits(cost.needs):
                    found.priced.append(cost)
                    self._fitting.add(plan)
                    best = min(best, self._of(cost))
                else:
                    self._with_recompute(group, least, queue)
        found.priced.sort(key=self._of)
        return found

    def _closer(self, entry: _Entry, bound: float) -> tuple[float, int, bool]:
        """The next closer bound that says more than ``bound``, which one it is, and whether the plan may fit."""
        group, plan, fits = entry.group, entry.plan, True
        if plan is None or self.objective != "time":
            return bound, entry.sure, fits
        for sure in range(entry.sure, 2):
            if sure == 0:
                seconds = self._open[group][0].closely(plan)
            else:
                seconds, peak = self._steadily(group, plan)
                fits = self._fits(peak)
            if not fits or seconds > bound * (1 + 1e-9):
                return max(bound, seconds), sure + 1, fits
        return bound, 2, fits

    def _steadily(self, group: Plan, plan: Plan) -> tuple[float, int]:
        """Seconds and bytes at least, by the prices of few microbatches: each more takes at least what the last ones took."""
        if plan.microbatches <= _FEW * plan.pp:
            return 0.0, 0
        try:
            two, three = (self.cost(group, replace(plan, microbatches=n * plan.pp)) for n in (2, 3))
        except (PlanError, ScheduleError):
            return 0.0, 0
        more = (three.seconds - two.seconds) / plan.pp
        return _STEADY * (three.seconds + more * (plan.microbatches - 3 * plan.pp)), three.peak

    def _of(self, cost: JobCost) -> float:
        return cost.seconds if self.objective == "time" else float(cost.needs)

    def _fits(self, nbytes: int) -> bool:
        return not self.limit or nbytes <= self.limit

    def _too_large(self, group: Plan) -> bool:
        """Whether what a rank keeps, whatever is computed again, is more than its memory: nothing is recorded then."""
        elements, experts = self.space.subject.elements(group)
        if not self.limit or not elements:
            return False
        stages = (0, 1, 2, 3) if group.dp * group.cp > 1 else (0,)
        zeros = [self.space.fixed["zero"]] if "zero" in self.space.fixed else stages
        states = (TrainingState(replace(group, zero=zero), self.machine) for zero in zeros if zero in stages)
        least = min((sum(always_kept(state, elements, 0, experts)) for state in states), default=0)
        return least > self.limit

    def _at_least(self, group: Plan) -> float:
        """What the plans of a group take at least, before it is recorded: by a group whose layers are divided less."""
        if self.objective != "time" or group in self._open or self.space.subject.is_cheap(group, self._seen):
            return 0.0
        of = self._alike(group)
        if of is None:
            return 0.0
        if (group, of) not in self._guessed:
            less, _ = self.opened(of)
            pieces = divided(less.pieces, (group.tp * group.cp) // (of.tp * of.cp))
            guess = Bounds(pieces, pieces, less.machine)
            found = (guess.quickly(plan) for plan in self.space.members(group))
            self._guessed[group, of] = min((s for s, peak in found if self._fits(peak)), default=float("inf"))
        return self._guessed[group, of]

    def _alike(self, group: Plan) -> Plan | None:
        """A group with the same rows that divides its layers less, and that is known, or need not be recorded."""
        found = None
        for tp in range(1, group.tp + 1):
            for cp in range(1, group.cp + 1):
                if group.tp % tp or group.cp % cp or (tp, cp) == (group.tp, group.cp):
                    continue
                dp = self.space.world // (tp * cp * group.pp)
                one = replace(group, tp=tp, cp=cp, dp=dp, sequence_parallel=group.sequence_parallel and tp > 1)
                if self.space.subject.is_cheap(one, self._seen):
                    found = one
        return found

    def _open_all(self, group: Plan, found: Searched, queue: _Queue) -> None:
        """Put the plans of a group in line."""
        try:
            bounds, _ = self.opened(group)
        except _OF_PROGRAMS as fault:
            if group.recompute == "none" or "recompute" in self.space.fixed:
                raise
            self.space.leave_out(  # it keeps something from one forward to the next, as transformers' caches do
                f"recompute={group.recompute!r}: a block that runs once more does not do the same: {str(fault).splitlines()[0]}"
            )
            return
        large = float("inf")
        for plan in self.members(group):
            found.looked += 1
            if group.recompute != "none" and self.objective == "time":
                without = replace(plan, recompute="none", recompute_blocks=0)
                if without in self._fitting:
                    continue  # it fits without, and is faster then
            try:
                seconds, peak = bounds.quickly(plan)
            except PlanError:
                continue
            if self._fits(peak):
                queue.put(seconds if self.objective == "time" else float(peak), _Entry(group, plan))
                continue
            large = min(large, seconds)
        if self.objective != "time":
            large = 0.0
        if large < float("inf"):
            self._with_recompute(group, large, queue)

    def _with_recompute(self, group: Plan, least: float, queue: _Queue) -> None:
        """A plan of a group does not fit: look at those that compute again. They take no less time."""
        if group in self._again:
            return
        self._again.add(group)
        for other in self.space.again(group):
            queue.put(least, _Entry(other))


_OF_PROGRAMS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What somebody's code may raise."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A group that is not recorded yet, or one of its plans; ``sure``: how many closer bounds it has been put in line by."""

    group: Plan
    plan: Plan | None = None
    sure: int = 0


class _Queue:
    """Entries by what they take at least."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Entry]] = []
        self._order = count()

    def put(self, least: float, entry: _Entry) -> None:
        """Entries of one bound come in the order in which they were put."""
        heapq.heappush(self._heap, (least, next(self._order), entry))

    def take(self) -> tuple[float, _Entry]:
        """The one with the least."""
        least, _, entry = heapq.heappop(self._heap)
        return least, entry

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def least(self) -> float:
        """The bound of the next one."""
        return self._heap[0][0]
