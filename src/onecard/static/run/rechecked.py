"""Recordings that check themselves: now and then a step runs as it is, and is compared, call by call, with what was recorded.

Guards say what a recording is known to depend on. What no guard knows (a value that Python reads in a way that nobody thought
of, a branch, a message of the program's own) is found here: while the step runs, each operator, each message and each function
of ours is held against the one that was written down at its place, with its operands by where they come from, its constants,
and the numbers that a replay would compute. So no habit is believed for longer than a few calls. Nothing is recorded for it:
a look at a call takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from onecard.comm.agree import sparse_check
from onecard.comm.issue.groups import Group
from onecard.static.capture.questions import WholeQuestions
from onecard.static.capture.script import StepScript
from onecard.static.run.agreed import anybody
from onecard.static.run.follower import Follower
from onecard.static.step.step import MISS

SELDOM = 512  # calls: never more than one of so many is compared in the steady state
SKETCH_SELDOM = 4096


def next_check(call: int) -> int:
    """The next call that is compared after this one: 3, 4, 8, 16, ..., later each 512th.

    Example:
        >>> calls = [2]
        >>> while calls[-1] < 1500:
        ...     calls.append(next_check(calls[-1]))
        >>> calls[1:]
        [3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536]
    """
    return 3 if call < 3 else 4 if call == 3 else call + min(call, SELDOM)


def next_sketch(call: int) -> int:
    """The next call at which a step that nobody can run is written down once more: 3, 8, 64, 512, later each 4096th.

    It takes as long as recording does.

    Example:
        >>> calls = [2]
        >>> while calls[-1] < 9000:
        ...     calls.append(next_sketch(calls[-1]))
        >>> calls[1:]
        [3, 8, 64, 512, 4096, 8192, 12288]
    """
    return 3 if call < 3 else 8 if call == 3 else call + min(call * 7, SKETCH_SELDOM)


class Recounted:
    """Looks at what microbatches divide by, at each call.

    What a GPU has found is noted there, and read in the first 16 calls and then as often as a step is compared: nobody waits for
    it in between, and nothing is lost.
    """

    def __init__(self) -> None:
        self.calls = self.due = 0
        self._noted: dict[int, tuple[Any, Tensor]] = {}

    def told(self, recording: Any, leaves: Sequence[Any]) -> list[str]:
        """What to say of this call's batch, once of each count."""
        self.calls += 1
        if not recording.counts or not sparse_check.on.here:
            return []
        if reads := self.calls >= self.due:
            self.due = self.calls + 1 if self.calls < 16 else next_check(self.calls)
        differ = [count for count in recording.counts if self._differs(count, leaves, reads)]
        recording.counts = tuple(count for count in recording.counts if all(count is not other for other in differ))
        return list(dict.fromkeys(count.said for count in differ))

    def _differs(self, count: Any, leaves: Sequence[Any], reads: bool) -> bool:
        found = count.differing(leaves)
        if not isinstance(found, Tensor):
            return found
        found = found | self._noted.get(id(count), (count, found))[1]
        self._noted[id(count)] = count, found
        return (reads or found.device.type == "cpu") and bool(found)


def given_to(bound: Any, leaves: Sequence[Any]) -> Any:
    """The inputs of a bound recording's graph for these arguments, if all guards hold; else MISS."""
    if bound.seen_differs():
        return MISS
    try:
        return bound.ready(leaves)
    except (KeyError, AttributeError, IndexError):  # what it is bound to is no longer there
        return MISS


class Checks:
    """When a recording is compared with its step, and what with.

    Attributes:
        calls: how many there were, the recorded one and the one before it included; ``due``: which is compared next.
        script: what was recorded; ``lines``: the groups of its messages, whose ranks compare at the same calls.
        found: what was not as it was recorded.
        without_data: whether it was written down without being done; ``asked``: what was asked of its whole batch then.
    """

    def __init__(self, script: StepScript | None, lines: Sequence[Group]) -> None:
        self.script, self.lines = script, lines
        self.calls, self.due = 2, next_check(2) - 1
        self.found, self.without_data = "", False
        self.asked: WholeQuestions | None = None

    def hold(
        self,
        given: Any,
        roots: Sequence[Any],
        leaves: Sequence[Any],
        step: Any,
        note: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run the step as it is, with these inputs, and hold it against the recording; what it returns.

        ``note``: is told of what the step writes to, as the run is taken back; it is not done where nobody compares.
        """
        self.due = next_check(self.calls + 1) - 1
        if self.script is None or not sparse_check.on.here:
            return step() if note is None else None
        follower = Follower(self.script, given, roots, leaves, note)
        with sparse_check.every_call():
            result = follower.run(step)
        self._agree(str(follower.found or ""))
        return result

    def sketched(self, again: Callable[[StepScript], str]) -> None:
        """Of a step that was not done: ``again`` writes it down once more, and says what differs."""
        self.due = next_sketch(self.calls + 1) - 1
        if self.script is not None and sparse_check.on.here:
            self._agree(again(self.script))

    def _agree(self, found: str) -> None:
        self.found = found
        if anybody(self.lines, bool(found)) and not found:
            self.found = "another rank has found it"


NEVER = Checks(None, ())
NEVER.due = 1 << 62
