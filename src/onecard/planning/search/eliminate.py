"""The cheapest choice for many variables whose costs are sums of terms of a few of them: exact, by elimination. Pure.

Source: Bertele and Brioschi, Nonserial Dynamic Programming, 1972.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
LARGEST = 2 * 10**6
"""Entries of a table; a problem that needs more is not solved exactly."""


@dataclass
class Problem:
    """Variables with so many choices each, and terms: a table of costs for some of them.

    Example:
        >>> p = Problem()
        >>> a, b = p.variable(2), p.variable(2)
        >>> p.add((a,), [0.0, 1.0])
        >>> p.add((a, b), [[5.0, 4.0], [0.0, 2.0]])
        >>> p.solve()
        (1.0, [1, 0])
    """

    sizes: list[int] = field(default_factory=list)
    terms: list[tuple[tuple[int, ...], Table]] = field(default_factory=list)

    def variable(self, choices: int) -> int:
        """A new variable; its number."""
        self.sizes.append(choices)
        return len(self.sizes) - 1

    def add(self, variables: Sequence[int], costs: object) -> None:
        """A term; ``inf`` forbids."""
        self.terms.append((tuple(variables), np.asarray(costs, dtype=np.float64)))

    def solve(self) -> tuple[float, list[int]] | None:
        """The least cost, and a choice for each variable; None if it takes too large a table.

        Variables go one by one, the one first that leaves the smallest table behind; of choices that cost the same the first
        counts.
        """
        by: dict[int, set[int]] = {v: set() for v in range(len(self.sizes))}
        terms = dict(enumerate(self.terms))
        for number, (variables, _) in terms.items():
            for v in variables:
                by[v].add(number)
        gone: list[tuple[int, tuple[int, ...], Table]] = []
        base = 0.0
        # Kept from choice to choice: only what is around a variable that goes is left another one.
        after = {v: self._after(v, by, terms) for v in by}
        while after:
            v = min(after, key=lambda v: (after[v], v))
            around = self._around(v, by, terms)
            if float(np.prod([self.sizes[u] for u in (v, *around)], dtype=np.float64)) > LARGEST:
                return None
            table = np.zeros([self.sizes[u] for u in (*around, v)])
            for number in sorted(by[v]):
                table = table + self._spread(terms[number], (*around, v))
            gone.append((v, around, table))
            for number in list(by[v]):
                for u in terms.pop(number)[0]:
                    by[u].discard(number)
            least = table.min(axis=-1)
            if around:
                new = len(self.terms) + len(gone)
                terms[new] = (around, least)
                for u in around:
                    by[u].add(new)
            else:
                base += float(least)
            del after[v]
            after.update((u, self._after(u, by, terms)) for u in around)
        chosen = [0] * len(self.sizes)
        for v, around, table in reversed(gone):
            chosen[v] = int(table[tuple(chosen[u] for u in around)].argmin())
        return base, chosen

    def _around(
        self, v: int, by: dict[int, set[int]], terms: dict[int, tuple[tuple[int, ...], Table]]
    ) -> tuple[int, ...]:
        return tuple(sorted({u for number in by[v] for u in terms[number][0]} - {v}))

    def _after(self, v: int, by: dict[int, set[int]], terms: dict[int, tuple[tuple[int, ...], Table]]) -> float:
        return float(np.prod([self.sizes[u] for u in self._around(v, by, terms)], dtype=np.float64))

    def _spread(self, term: tuple[tuple[int, ...], Table], over: tuple[int, ...]) -> Table:
        """A term's table with an axis for each of these variables."""
        variables, table = term
        order = sorted(range(len(variables)), key=lambda i: over.index(variables[i]))
        mine = [variables[i] for i in order]
        return table.transpose(order).reshape([self.sizes[u] if u in mine else 1 for u in over])
