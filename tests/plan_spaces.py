"""Random small spaces of plans: the plan that is found beside the best of all, each priced.

``python tests/plan_spaces.py --count 200`` (``--first 52``: without the first ones); exit status 1 if any is more than 1 % worse.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onecard as oc
from onecard.machine.cost import Machine
from onecard.planning.job import JobCost
from onecard.planning.search.api import in_order
from onecard.planning.search.find import Search
from onecard.planning.search.space import Space
from onecard.planning.search.subject import PlanSubject, subject_of

A100 = Machine.preset("A100")
MACHINES = (
    A100,
    Machine.preset("H100"),
    replace(A100, name="slow links", kernels=None, bandwidth=2e9, between_hosts=1e9),
)
SIZES = (
    oc.Transformer(layers=6, hidden=1024, heads=8, vocab=8192, sequence=1024),
    oc.Transformer(layers=3, hidden=512, heads=4, vocab=32768, sequence=256, tied=True),
    oc.Transformer(layers=8, hidden=256, heads=4, kv_heads=2, vocab=1000, sequence=2048, norm="rms", gated=True, bias=False),
)  # fmt: skip
WORST = 1.01


def subjects_of(count: int) -> list[PlanSubject]:
    """The first models, of which each keeps what was recorded of it."""
    return [subject_of(sizes, rows, None, {}) for sizes, rows in zip(SIZES[:count], (16, 8, 16), strict=False)]


def spaces(count: int, subjects: Sequence[PlanSubject]) -> Iterator[tuple[PlanSubject, int, Machine, dict[str, Any]]]:
    """Random small spaces: models, ranks, rows, machines, what is fixed."""
    draw = random.Random(11)
    for _ in range(count):
        subject = draw.choice(subjects)
        fixed: dict[str, Any] = {}
        if draw.random() < 0.5:
            fixed[draw.choice(("pp", "tp"))] = draw.choice((1, 2))
        if draw.random() < 0.3:
            fixed["zero"] = draw.choice((0, 1, 3))
        yield subject, draw.choice((2, 4, 8)), draw.choice(MACHINES), fixed


def limit_of(costs: Sequence[JobCost], at: float) -> int:
    """A limit of memory under which some of the plans fit."""
    peaks = sorted(cost.needs for cost in costs)
    return peaks[int(at * (len(peaks) - 1))]


@dataclass(frozen=True)
class Compared:
    """A space: how many plans it has, how many were priced, and what is found beside the best of all: time under a limit of
    memory, memory, and memory by a quick look."""

    looked: int
    priced: int
    seconds: float
    peak: float
    quick: float

    @property
    def good(self) -> bool:
        """As good as looking at everything."""
        return self.seconds <= WORST and self.peak == 1 and self.quick <= 1.05


def compared(number: int, subject: PlanSubject, world: int, machine: Machine, fixed: dict[str, Any]) -> Compared | None:
    """The space of a number, which chooses its limit of memory; None: it has no plans."""

    def search(limit: int, objective: str = "time", quick: bool = False) -> Search:
        return Search(Space(subject, world, machine, fixed, quick), machine, limit, objective)

    costs = list(search(0).everything())
    if not costs:
        return None
    limit, least = limit_of(costs, (number % 5) / 5), min(cost.needs for cost in costs)
    best = min(cost.seconds for cost in costs if cost.needs <= limit)
    found = search(limit).run().priced
    taken = in_order(found)[0]
    assert taken.needs <= limit
    peaks = [search(0, "memory", quick).run().priced[0].needs / least for quick in (False, True)]
    return Compared(len(costs), len(found), taken.seconds / best, *peaks)


def main() -> int:
    """Goes through them and prints the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    every: list[Compared] = []
    for number, space in enumerate(spaces(given.count, subjects_of(len(SIZES)))):
        found = compared(number, *space) if number >= given.first else None
        if found is not None:
            every.append(found)
            if not found.good:
                print(f"space {number}: {found}, {space[1:]}", flush=True)
        if number % 10 == 9 and every:
            print(f"{number + 1}: worst {max(e.seconds for e in every):.4f}", flush=True)
    bad = sum(not found.good for found in every)
    print(
        f"{len(every)} spaces, {sum(e.looked for e in every):,} plans, {sum(e.priced for e in every):,} priced: {bad} worse than "
        f"the best of all; the worst by {max(e.seconds for e in every) - 1:.2%}, memory by {max(e.peak for e in every) - 1:.2%}, "
        f"by a quick look {max(e.quick for e in every) - 1:.2%}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
