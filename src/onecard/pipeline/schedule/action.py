"""Action and Schedule: what each rank of a pipeline does, in order. Pure data, written as in torch's CSV files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onecard.errors import ScheduleError

COMPUTE = ("F", "B", "I", "W")
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
KINDS = COMPUTE + SENDS + RECEIVES
_ACTION = re.compile(r"(\d+)(" + "|".join(sorted(KINDS, key=len, reverse=True)) + r")(\d+)")


class Action(NamedTuple):
    """One thing that a rank does: its kind, for one stage and one microbatch.

    Kinds: ``F`` forward; ``B`` the whole backward; ``I`` the input-gradient half of a backward and ``W`` its
    weight-gradient half; ``SEND_F`` and ``RECV_F`` of an activation, ``SEND_B`` and ``RECV_B`` of a gradient. The stage
    is the one that has or wants the tensor: what ``1SEND_F0`` sends, ``2RECV_F0`` receives.

    Source: the letters and the text form are those of ``torch.distributed.pipelining``.

    Example:
        >>> Action("SEND_F", 1, 0)
        1SEND_F0
        >>> Action.parse("2RECV_F0").stage
        2
    """

    kind: str
    stage: int
    microbatch: int

    @staticmethod
    def parse(text: str) -> Action:
        """The action that a text such as ``3F0`` names; ScheduleError if it names none."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is no action: write stage, kind, microbatch, as in 3F0; kinds are {KINDS}")
        return Action(match[2], int(match[1]), int(match[3]))

    @property
    def is_compute(self) -> bool:
        """Whether it computes; else it is half of a message."""
        return self.kind in COMPUTE

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def received_by(send: Action) -> Action:
    """The action at the other end of a send."""
    kind, stage, microbatch = send
    return _action(("RECV_F", stage + 1, microbatch) if kind == "SEND_F" else ("RECV_B", stage - 1, microbatch))


def sent_by(receive: Action) -> Action:
    """The action at the other end of a receive."""
    kind, stage, microbatch = receive
    return _action(("SEND_F", stage - 1, microbatch) if kind == "RECV_F" else ("SEND_B", stage + 1, microbatch))


_action = Action._make


@dataclass(frozen=True)
class Schedule:
    """The order of actions of each rank of a pipeline; everything else about it is computed from that.

    Attributes:
        ranks: for each rank its actions, first to last.
        name: what to call it in titles and errors.

    Example:
        >>> schedule = Schedule.of([["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]])
        >>> schedule.num_stages, schedule.num_microbatches, schedule.stage_to_rank
        (2, 1, {0: 0, 1: 1})
        >>> schedule.compute().ranks
        ((0F0, 0B0), (1F0, 1B0))
    """

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    @staticmethod
    def of(ranks: Iterable[Iterable[Action | str]], name: str = "schedule") -> Schedule:
        """A schedule of actions, each an Action or its text."""
        rows = ((a if isinstance(a, Action) else Action.parse(a) for a in row) for row in ranks)
        return Schedule(tuple(tuple(row) for row in rows), name)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.name))

    def __hash__(self) -> int:
        return self._hash  # of thousands of actions: once

    @cached_property
    def num_stages(self) -> int:
        """One more than the last stage that computes."""
        return 1 + max((a.stage for row in self.ranks for a in row if a.kind in COMPUTE), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """One more than the last microbatch that is computed."""
        return 1 + max((a.microbatch for row in self.ranks for a in row if a.kind in COMPUTE), default=-1)

    @cached_property
    def stage_to_rank(self) -> dict[int, int]:
        """The rank that computes each stage (most of it, where several do: `check_schedule` refuses that)."""
        count = Counter((a.stage, rank) for rank, row in enumerate(self.ranks) for a in row if a.kind in COMPUTE)
        return {stage: rank for (stage, rank), _ in sorted(count.items(), key=lambda item: (item[0][0], item[1]))}

    @cached_property
    def has_messages(self) -> bool:
        """Whether sends and receives are written down."""
        return any(a.kind not in COMPUTE for row in self.ranks for a in row)

    def compute(self) -> Schedule:
        """The same without sends and receives."""
        return Schedule(tuple(tuple(a for a in row if a.kind in COMPUTE) for row in self.ranks), self.name)

    def send_of(self, action: Action) -> Action | None:
        """The send of what an action computes; None if it stays on its rank or nobody wants it."""
        kind, stage, microbatch = action
        if kind == "W":
            return None
        other = self.stage_to_rank.get(stage + 1 if kind == "F" else stage - 1)
        if other is None or other == self.stage_to_rank[stage]:
            return None
        return Action("SEND_F" if kind == "F" else "SEND_B", stage, microbatch)

    def __repr__(self) -> str:
        sizes = f"{len(self.ranks)} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"Schedule({self.name}: {sizes})"


def positive(**sizes: int) -> None:
    """ScheduleError unless each size is a positive whole number."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ScheduleError(f"{name}={size!r}: a pipeline needs a whole number of {name}, 1 or more")


def per_stage(value: float | Sequence[float], stages: int, name: str) -> list[float]:
    """A number for each stage, from one number or a sequence of them; ScheduleError if the count does not fit."""
    values = [float(value)] * stages if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) != stages:
        raise ScheduleError(
            f"{name} has {len(values)} entries, the schedule {stages} stages: give one number, or {stages}"
        )
    if any(not 0 <= v < float("inf") for v in values):
        raise ScheduleError(f"{name}={value!r}: want finite numbers that are not negative")
    return values
