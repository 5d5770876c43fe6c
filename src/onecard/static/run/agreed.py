"""Whether all ranks of a line still send the same messages in the same order, after each pass: asked when it is recorded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from onecard.comm.agree import sparse_check
from onecard.comm.agree.meeting import come
from onecard.comm.base import failed, record
from onecard.comm.base.failed import StoppedBefore
from onecard.comm.base.state import Kept, faked
from onecard.comm.base.warned import warn
from onecard.comm.issue import collectives, trace
from onecard.comm.issue.groups import Group, group
from onecard.comm.issue.ranks import of_ranks
from onecard.comm.world import world
from onecard.comm.world.pretend import pretending
from onecard.comm.world.world import get_rank
from onecard.errors import RecordingError


@dataclass(frozen=True)
class Agreed:
    """The lines on which all ranks send alike, in an order in which all can use them; or after which pass they do not."""

    lines: list[Group]
    apart: str = ""


def check_agreed(name: str, stages: Sequence[tuple[str, dict[Any, list[Any]]]]) -> Agreed:
    """Compare this rank's messages with those of the others, line by line. One small message for each line, and
    a few more on a mesh of several axes.

    Args:
        name: of the step.
        stages: the messages of the graph as it was recorded (``order.line_up``), with the name "", and after each pass.

    Returns:
        The lines; or the first pass after which messages differ on any rank that they lead to, the same on all of these.

    Raises:
        RecordingError: they differ as they were recorded: a replay would wait for a message that nobody sends. On all ranks that
            the lines lead to, also where nothing differs.
    """
    messages = [found for _, found in stages]
    if pretending() or trace.faking():
        return Agreed([])
    # In one order on all ranks, which use their lines in several: no circle of ranks that wait for each other.
    used = sorted(messages[0], key=lambda line: group(*line).ranks)
    fault, first = "", len(stages)
    for line in used:
        found = group(*line)
        mine = torch.tensor(
            [zlib.crc32(repr(m.get(line, [])).encode()) for m in messages], dtype=torch.int64, device="cpu"
        )
        lengths = [1] * found.size
        record.serving.here = ("to_static", "messages", (len(messages),))
        theirs: Any = collectives.all_gather(mine[None], found, 0, lengths)
        differs = [i for i, row in enumerate(theirs.T) if len(set(row.tolist())) > 1]
        if differs and not differs[0]:
            fault = fault or _words(name, found.ranks, theirs.T[0].tolist(), len(messages[0][line]))
        first = min([first, *differs])
    lines_used = [group(*line) for line in used]
    if len(lines_used) > 1:  # one line alone has told all that it leads to
        first = earliest(lines_used, first)
    if first == 0:
        raise RecordingError(
            fault
            or f"{name}: the messages of other ranks, with which this rank's partners exchange some, differ: rank {get_rank()} "
            "has found nothing wrong with its own. Their error says what differs"
        )
    return Agreed(lines_used, stages[first][0] if first < len(stages) else "")


def together(ranks: Sequence[int]) -> list[Group]:
    """The line of ranks that do one step together; none where one is alone."""
    return [] if len(ranks) < 2 or pretending() or trace.faking() else [of_ranks(tuple(ranks), "stages")]


@contextmanager
def all_or_none(name: str, what: str, ranks: Callable[[], Sequence[int]]) -> Iterator[None]:
    """What ranks do together, each on its own: where one fails, all do, at once. Through the store.

    A rank that fails leaves word of it and goes, whoever its partners would have been: it need not know them.

    Args:
        name: of the step; ``what``: is done, in a word, of which there is one on all ranks.
        ranks: who does it, asked for once it is done. Nothing inside may wait for any of them, but where all have come to.

    Raises:
        RecordingError: others have failed, and this rank has not; names them, and quotes what they say.
        CommunicationError: others have not come to it in time.
    """
    channel = f"{what}/{name}"
    here = world.get_world_size() > 1 and not (pretending() or trace.faking() or faked.here or world.alone.here)
    if here:
        world.init()
    try:
        yield
        together = sorted(ranks())
    except Exception as why:
        if here:
            come(channel, (), lambda _: None, f"{type(why).__name__}: {why}"[:_QUOTED])
        raise
    if not here or len(together) < 2:
        return

    def slow(missing: list[int]) -> None:
        warn(f"{name}: rank(s) {missing} have not come to record it yet; waiting for them")

    words, missing = come(channel, together, slow)
    if failed := {rank: said for rank, said in words.items() if said}:
        raise RecordingError(
            f"{name}: rank(s) {[*failed]} could not record this step; rank {get_rank()} could, and stops with them.\n"
            + "\n".join(f"  rank {rank}: {said}" for rank, said in failed.items())
        )
    if missing:
        sparse_check.stop(
            f"{name}: rank(s) {missing} have not come to record this step with rank {get_rank()}: all ranks of a pipeline call "
            "it at once, with the whole batch. If a rank died, the launcher says how"
        )


_QUOTED = 600
"""Characters of what another rank says."""


def anybody(lines: Sequence[Group], found: bool) -> bool:
    """Whether this rank has found something, or any other that the lines lead to. One small message for each line and axis."""
    return earliest(lines, 0 if found else 1) == 0


def earliest(lines: Sequence[Group], number: int) -> int:
    """The smallest number of this rank and all others that the lines lead to. One small message for each line and axis."""
    for _ in lines:  # what the rank across two axes has found comes by way of a third one
        for line in lines:
            record.serving.here = ("to_static", "checked", ())
            theirs: Any = collectives.all_gather(torch.tensor([number], device="cpu"), line, 0, [1] * line.size)
            number = int(theirs.min())
    return number


def all_record(name: str, lines: Sequence[Group], why: str) -> None:
    """Wait until the ranks that this one exchanges messages with have come to record the step anew as well.

    Raises:
        CommunicationError: they have not: they replay, so that each would wait for messages that the other does not send.
    """
    ranks = sorted({rank for line in lines for rank in line.ranks})
    if len(ranks) < 2 or pretending() or trace.faking():
        return
    words = (
        f"{name} fits no recording on rank {get_rank()} ({why or 'nothing is known to differ'}), but it does on rank(s)"
    )

    def slow(missing: list[int]) -> None:
        warn(f"{words} {missing}, it seems, which have not come to record it anew; waiting for them")

    if failed.doing.here is not None:
        failed.doing.here.turns(f"{why or 'nothing is known to differ'}. {_ALIKE}")
    _, missing = come(f"record/{name}", ranks, slow)
    if missing:
        sparse_check.stop(
            f"{words} {missing}: a rank that replays and one that records send different messages. {_ALIKE}"
        )


_ALIKE = (
    "What a step depends on has to be the same on all ranks: make the flag an argument that is equal everywhere, or "
    "torch.where(flag, a, b)"
)


class ReplayTurn:
    """What ranks that do one step together say of a call before any of them sends: which recording they replay, if any.

    So one that has to record it anew does not wait for others that wait for its messages, and all read the same numbers: a rate
    that one rank alone lowers would train its stage alone otherwise. One small message for each call.

    Attributes:
        ranks: who does the step.
        number: of the recording among those of the step, by which all ranks mean the same one.
        why: the last time that they did not all replay it, as another rank says it.
    """

    def __init__(self, name: str, ranks: Sequence[int], numbers: Sequence[str]) -> None:
        self._name, self.ranks, self._numbers, self.number, self.why = name, tuple(ranks), numbers, 0, ""

    def replays(self, *numbers: float) -> bool:
        """This rank replays; whether all others do, too.

        Raises:
            RecordingError: they do, with other numbers; on all ranks alike.
        """
        packed = struct.pack(f"{len(numbers)}d", *numbers)
        said = self._said(self.number, zlib.crc32(packed))
        if any(number != self.number for number, _ in said):
            self.why = self._reasons("")
            return False
        if len({code for _, code in said}) > 1:
            self._apart(numbers)
        return True

    def stopped(self, fault: Exception) -> None:
        """A replay has ended in its midst on this rank: what others have sent for it lies there yet."""
        if not isinstance(fault, RecordingError):
            _stopped.here.setdefault(self.ranks, f"{type(fault).__name__}: {fault}")

    def records(self, why: str) -> None:
        """This rank records the step anew, and so do all."""
        self._said(-1, 0)
        self._reasons(why)

    def _reasons(self, mine: str) -> str:
        if len(self.ranks) < 2 or pretending() or trace.faking():
            return mine
        theirs = self._gathered(
            torch.tensor([[*mine.encode()[:_QUOTED].ljust(_QUOTED)]], dtype=torch.uint8, device="cpu")
        )
        said = (bytes(row.tolist()).decode(errors="replace").strip() for row in theirs)
        found = ((rank, words) for rank, words in zip(self.ranks, said, strict=True) if words)
        return next((f"on rank {rank} {words}" for rank, words in found), "other ranks replay another recording")

    def _said(self, *mine: int) -> list[list[int]]:
        if len(self.ranks) < 2 or pretending() or trace.faking():
            return [[*mine]]
        if why := _stopped.here.get(self.ranks):
            raise StoppedBefore(
                f"{self._name}: an earlier call ended in the midst of the pipeline on rank {get_rank()}, and messages of it may "
                f"still be on their way, which this call would take for its own ({why}). Look at what may be wrong with a batch "
                "(labels, NaN) ahead of the step, on all ranks; from here on go on in a new run, from a checkpoint"
            )
        found: list[list[int]] = self._gathered(torch.tensor([mine], device="cpu")).tolist()
        return found

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        record.serving.here = ("to_static", "turn", ())
        theirs: Any = collectives.all_gather(mine, of_ranks(self.ranks, "stages"), 0, [1] * len(self.ranks))
        return torch.as_tensor(theirs)

    def _apart(self, numbers: Sequence[float]) -> NoReturn:
        theirs = self._gathered(torch.tensor([numbers], dtype=torch.float64, device="cpu"))
        at = next(i for i in range(len(numbers)) if len(set(theirs[:, i].tolist())) > 1)
        said = ", ".join(f"{x!r} on rank {rank}" for rank, x in zip(self.ranks, theirs[:, at].tolist(), strict=True))
        raise RecordingError(
            f"{self._name}: {self._numbers[at]} is {said}; each rank of a pipeline does its part of one program, so that what a "
            "step reads of Python's numbers is the same on all: step schedulers, and set rates and weights, on every rank "
            "(not within 'if onecard.get_rank() == 0:')"
        )


_stopped: Kept[dict[tuple[int, ...], str]] = Kept(dict)
"""Why a replay ended in its midst on this rank, by the ranks of the pipeline."""


def _words(name: str, ranks: Sequence[int], codes: list[int], count: int) -> str:
    usual = max(set(codes), key=codes.count)
    others = [rank for rank, code in zip(ranks, codes, strict=True) if code != usual] or list(ranks)
    return (
        f"{name}: the messages among ranks {list(ranks)} differ as they were recorded: those of {others}; here there are "
        f"{count}. All ranks have to run the same program"
    )
