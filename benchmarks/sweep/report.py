"""The results as tables: on the terminal and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table
from sweep.engine import Outcome

STATES = ("right", "refused", "wrong", "crashed", "one-sided", "hung")


def summary(found: Mapping[str, Sequence[Outcome]], seconds: Mapping[str, float]) -> Table:
    """Operators by library, dtype and state."""
    table = Table(title="operators of PyTorch's database on 2 ranks", title_justify="left")
    for name in ("library", "dtype", "operators", "cases", *STATES, "right %", "ruled", "decomposed", "gathered"):
        table.add_column(name, justify="left" if name in ("library", "dtype") else "right")
    table.add_column("seconds", justify="right")
    for library, outcomes in found.items():
        for cells in _rows(library, outcomes):
            table.add_row(*cells, f"{seconds[library]:.0f}")
    return table


def _rows(library: str, outcomes: Sequence[Outcome]) -> list[list[str]]:
    rows = []
    for dtype in dict.fromkeys(o.dtype for o in outcomes):
        mine = [o for o in outcomes if o.dtype == dtype and o.cases]
        states, how = Counter(o.state for o in mine), Counter(o.how for o in mine)
        share = 100 * states["right"] / max(len(mine), 1)
        known = [str(how[h]) if library == "onecard" else "" for h in ("ruled", "decomposed", "gathered")]
        cases = sum(o.cases for o in mine)
        rows.append(
            [library, dtype, str(len(mine)), f"{cases:,}", *(str(states[s]) for s in STATES), f"{share:.1f}", *known]
        )
    return rows


def faults(library: str, outcomes: Sequence[Outcome], most: int) -> str:
    """What went wrong, operator by operator."""
    lines = []
    for o in sorted(outcomes, key=lambda o: (-STATES.index(o.state), o.name)):
        if o.state != "right":
            lines.append(f"{library} {o.dtype} {o.name}: {o.state} {o.counts}")
            lines += [f"    {text}" for text in sorted(o.faults, key=_severity)[:most]]
    return "\n".join(lines)


def _severity(text: str) -> int:
    return -STATES.index(text.partition(":")[0])


def page(found: Mapping[str, Sequence[Outcome]], seconds: Mapping[str, float]) -> str:
    return ""
