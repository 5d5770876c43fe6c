"""Which pass over recordings is at fault: the same proof with ever fewer passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onecard.proof.running import Case
from onecard.static.passes import ASKED, PASSES

ORDER = [name for known in PASSES for name in ((known, *ASKED) if known == "dead" else (known,))]
"""All passes, in the order in which they run."""


def which(case: Case, equal: Callable[[Case], bool]) -> str:
    """The pass after which a case is no longer one card's, in words.

    Args:
        case: that is not equal with all passes.
        equal: whether another one is.
    """
    if not equal(replace(case, recorded=False)):
        return "no pass is at fault: steps that run as they are, unrecorded, are not one card's either"
    if not equal(_first(case, 0)):
        return "no pass is at fault: recordings that no pass has rewritten are not one card's either"
    low, high = 0, len(ORDER)  # equal with so many of the first passes, and not equal with so many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if equal(_first(case, middle)) else (low, middle)
    name = ORDER[high - 1]
    before = f"after {', '.join(ORDER[:low])} " if low else ""
    found = f"the pass {name!r} is at fault: {before}the steps are one card's, with it they are not"
    return found + (f". Until it is mended: to_static(..., without=[{name!r}])" if name in PASSES else "")


def _first(case: Case, count: int) -> Case:
    """The same with the first passes alone."""
    return replace(case, without=tuple(ORDER[count:]))
