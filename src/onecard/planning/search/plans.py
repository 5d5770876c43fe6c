"""Plans: what a search has found, the best first, each with its cost and why it is where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, overload

from onecard.errors import PlanError
from onecard.planning.job import JobCost, bytes_in_words, seconds_in_words
from onecard.planning.plan import Plan
from onecard.planning.search.words import in_words, largest, more_in_words


@dataclass(frozen=True, slots=True)
class Choice:
    """One plan that was looked at.

    Attributes:
        plan: it; cost: what a step takes under it.
        why: in words, beside the best one.
        fits: whether every rank has the memory.
        name: of one that many would try first: "pure dp", "ZeRO-3", "Megatron's recipe"; else "".
    """

    plan: Plan
    cost: JobCost
    why: str
    fits: bool = True
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name + ': ' if self.name else ''}{in_words(self.plan)}: {self.why}"


@dataclass(frozen=True)
class Plans(Sequence[Choice]):
    """The plans of a search, the best first; ``print`` them.

    Attributes:
        choices: the best one and the runners-up: the best of each other way to divide the ranks.
        obvious: what many would try first, with why not.
        looked, priced, recorded: how many plans there were, how many needed a price, of how many recordings.
        limit: bytes of each rank; 0 if any.
        told: what of the job is not in the prices; "" if all is.
    """

    choices: tuple[Choice, ...]
    obvious: tuple[Choice, ...]
    looked: int
    priced: int
    recorded: int
    limit: int
    _again: Callable[[Mapping[str, Any]], Plans] = field(repr=False, compare=False)
    told: str = ""

    @property
    def best(self) -> Plan:
        """The plan to take."""
        return self.choices[0].plan

    @property
    def plan(self) -> Plan:
        """The same."""
        return self.best

    @property
    def cost(self) -> JobCost:
        """What a step takes under the best one."""
        return self.choices[0].cost

    @property
    def why(self) -> str:
        """Why it is the best one."""
        return self.choices[0].why

    @overload
    def __getitem__(self, i: int) -> Choice: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Choice, ...]: ...
    def __getitem__(self, i: int | slice) -> Choice | tuple[Choice, ...]:
        return self.choices[i]

    def __len__(self) -> int:
        return len(self.choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def what_if(self, **fixed: Any) -> Choice:
        """The best plan with these fields of ``Plan`` given, all others free, whether it fits or not.

        Raises:
            PlanError: no plan of so many ranks has them.
        """
        with suppress(PlanError):
            return self._beside(self._again({**fixed, "limit": self.limit}).choices[0])
        return self._beside(self._again({**fixed, "limit": 0}).choices[0])

    def _beside(self, one: Choice) -> Choice:
        return beside(one.cost, self.cost, self.limit)

    def diff(self, i: int = 1) -> tuple[str, ...]:
        """The fields in which a runner-up differs from the best one, in words.

        Raises:
            PlanError: no such runner-up was kept.
        """
        if not -len(self) <= i < len(self):
            raise PlanError(
                f"diff({i}): there is no plan {i}, as the search kept {len(self)}; what_if(...) finds others"
            )
        return self.best.diff(self.choices[i].plan)

    def __str__(self) -> str:
        lines = [f"{in_words(self.best)}: {self.why}"]
        for choice in (*self.obvious, *self.choices[1:]):
            lines.append(f"  not {choice}")
        count = f"{self.recorded:,} recording{'s' * (self.recorded > 1)}"
        seen = f"{self.looked:,} plan{'s' * (self.looked > 1)} looked at, {self.priced:,} priced, {count}"
        return "\n".join([*lines, f"  {seen}", *([f"  {self.told}"] if self.told else [])])


def chosen(cost: JobCost, limit: int, looked: int, second: JobCost | None, objective: str) -> Choice:
    """The best one, and why it is."""
    of = f", of {bytes_in_words(limit)}" if limit else ""
    terms = [
        f"{seconds / cost.seconds:.0%} {name}" for name, seconds in cost.terms.items() if seconds > 0.005 * cost.seconds
    ]
    why = f"{seconds_in_words(cost.seconds)} a step on {cost.machine.name or 'a machine by default'} ({', '.join(terms)}), "
    why += f"{bytes_in_words(cost.needs)} on every rank{of}; "
    why += f"the {'fastest' if objective == 'time' else 'smallest'} of {looked:,}"
    if second is not None:
        why += f", the next way to divide the ranks is {more_in_words(second, cost)}"
    return Choice(cost.plan, cost, why)


def beside(cost: JobCost, best: JobCost, limit: int, fitting: JobCost | None = None, name: str = "") -> Choice:
    """A plan beside the best one; ``fitting``: what is near it and fits, if it does not."""
    if limit and cost.needs > limit:
        why = f"{bytes_in_words(cost.needs)} on every rank, {bytes_in_words(cost.needs - limit)} too much: {largest(cost)}"
        if fitting is not None:
            changes = ", ".join(_changes(cost.plan, fitting.plan))
            why += f"; fits with {changes}, then {more_in_words(fitting, best)}"
        return Choice(cost.plan, cost, why, False, name)
    if cost.plan == best.plan:
        return Choice(cost.plan, cost, "it is the best one", True, name)
    return Choice(cost.plan, cost, f"{more_in_words(cost, best, True)}, {bytes_in_words(cost.needs)}", True, name)


def _changes(plan: Plan, other: Plan) -> list[str]:
    names = ("dp", "tp", "cp", "pp", "sequence_parallel", "schedule", "virtual", "microbatch", "zero", "replicas", "recompute",
             "recompute_blocks")  # fmt: skip
    return [f"{n}={getattr(other, n)}" for n in names if getattr(plan, n) != getattr(other, n)]
