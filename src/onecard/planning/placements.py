"""Placements as text, as a plan and its file have them: "tp: Shard(0), dp: Replicate". Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from onecard.errors import PlanError

_ONE = re.compile(r"\s*(\w+)\s*:\s*(?:(Shard)\s*\(\s*(?:dim\s*=\s*)?(\d+)\s*\)|(Replicate)(?:\s*\(\s*\))?)\s*")


def read(text: str) -> dict[str, Placement]:
    """Placements by the name of their mesh axis.

    Raises:
        PlanError: the text is none.

    Example:
        >>> read("tp: Shard(0), dp: Replicate")
        {'tp': Shard(dim=0), 'dp': Replicate()}
    """
    found: dict[str, Placement] = {}
    at = 0
    while at < len(text):
        match = _ONE.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ",") or match[1] in found:
            raise PlanError(
                f"placements {text!r}: want axes with what lies along them, as in 'tp: Shard(0), dp: Replicate'"
            )
        found[match[1]] = Shard(int(match[3])) if match[2] else Replicate()
        at = match.end() + 1
    return found


def placements_of(text: str, axes: Sequence[str]) -> list[Placement]:
    """One for each mesh axis; Replicate for those that are not named.

    Raises:
        PlanError: the text is none, or names an axis that is not there.
    """
    found = read(text)
    if strange := sorted(set(found) - set(axes)):
        raise PlanError(f"placements {text!r}: there is no axis {strange[0]!r}; there are {', '.join(axes)}")
    return [found.get(axis, Replicate()) for axis in axes]
