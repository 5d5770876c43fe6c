"""Who has failed in what ranks do together, so that those that wait for it hear of it while they wait.

A rank that fails leaves word in the rendezvous' store. A rank that waits in such a step looks there: for one that has failed in
this very step nobody can go on, and the wait ends with its words, also where its program has caught the error and is in the next
one; of one that has failed before, and has not come since, they are told: it may come yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from onecard.comm.base import attempt
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.errors import CommunicationError


class StoppedBefore(CommunicationError):
    """This rank cannot begin a step, for what it has said of an earlier one: that stays said."""


_ANY = "failed"
GRACE = 1.0
"""Seconds for ranks that fail alike: each has an error of its own, which says more."""
_OFTEN = 0.25  # seconds between two looks
FAILED, TURNS = "has failed in", "records anew"
QUOTED = 1000
"""Characters of what another rank says."""


@dataclass
class Together:
    """A step that ranks do together.

    Attributes:
        name: what people call it; ``ranks``: who does it; ``me``: this rank; ``number``: of the step among those of its name.
    """

    name: str
    ranks: tuple[int, ...]
    me: int
    number: int = 0
    looked: float = 0.0
    seen: dict[int, float] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    other: bool = False

    def begins(self) -> None:
        """The next one; what this rank has said is over."""
        self.number += 1
        if self.seen or self.told or self.other:
            self.seen, self.told, self.other = {}, set(), False
        comes(self.me)

    def failed(self, why: str) -> None:
        """Leave word that this rank cannot go on with it."""
        self._say(FAILED, why)

    def turns(self, why: str) -> None:
        """Leave word that this rank does it another way, for which it waits for all others."""
        self.other = True
        self._say(TURNS, why)

    def _say(self, does: str, why: str) -> None:
        _say(self.me, [self.name, [*self.ranks], self.number, does, why[:QUOTED]])

    def look(self) -> str:
        """Why it cannot be done any more, as another rank says; "" where nobody does. Asked by who waits."""
        now = time.monotonic()
        if now - self.looked < _OFTEN:
            return ""
        self.looked = now
        said = {rank: word for rank in self.ranks if rank != self.me and (word := _word(rank))} if _anybody() else {}
        self.seen = {rank: self.seen.get(rank, now) for rank in said}
        for rank, (name, ranks, number, does, why, *come) in said.items():
            if now - self.seen[rank] < GRACE or (does == TURNS and self.other):
                continue
            if (name, number) == (self.name, self.number) and self.me in ranks:
                return (
                    f"rank {rank} {does} {name} (call {number}), in which rank {self.me} waits for others. "
                    f"Rank {rank} says: {why}"
                )
            if rank not in self.told and does != TURNS and not come:
                self.told.add(rank)
                warn(
                    f"rank {self.me} waits in {self.name} (call {self.number}), to which rank {rank} has not come since it "
                    f"failed. Rank {rank} says: {why}",
                )
        return ""


doing: Kept[Together | None] = Kept(lambda: None)
"""The step that this rank is in."""
_left: Kept[list[Any]] = Kept(list)
"""The word that this rank has left."""


def looked() -> str:
    """Why what is waited for cannot come, as another rank says; "" outside of steps that ranks do together."""
    step = doing.here
    return "" if step is None else step.look()


def between(me: int, why: str) -> None:
    """Leave word of an error between steps; taken back by ``comes``."""
    _say(me, ["", [], 0, "", why])


def comes(me: int) -> None:
    """This rank goes on: what it has said is over, but for who waits in the step in which it has failed."""
    if _left.here:
        word, _left.here[:] = [*_left.here], []
        with suppress(RuntimeError, ValueError, dist.DistError):
            attempt.store().set(f"{_ANY}/{me}", json.dumps([*word, "has come"]) if FAILED in word else "")


def _say(me: int, word: Sequence[object]) -> None:
    _left.here[:] = word
    with suppress(RuntimeError, ValueError, dist.DistError):
        store = attempt.store()
        store.set(f"{_ANY}/{me}", json.dumps(word))
        store.set(_ANY, "")


def _anybody() -> bool:
    """Whether any rank has ever said something."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        return attempt.store().check([_ANY])
    return False


def _word(rank: int) -> list[Any]:
    """What a rank has said, of what, and why; [] where it has said nothing."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        store = attempt.store()
        if store.check([f"{_ANY}/{rank}"]):
            found = store.get(f"{_ANY}/{rank}").decode()
            return list(json.loads(found)) if found else []
    return []
