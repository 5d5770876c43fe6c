"""What a failed multi-rank run tells its user. Pure: from what was observed to text."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onecard.comm.base.flight import FlightEntry, describe, rank_text
from onecard.testing._job import RankReport

WATCH_THREAD = re.compile(r"Thread 0x\w+[^\n]*\n(?:  File [^\n]*\n)*?  File [^\n]*_rank\.py\", line \d+ in _watch\n")


# What Gloo, NCCL, shm and stores say on the ranks that survive when another one is gone, or is at another call.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|remote process exited|"
    r"socket (closed|timeout)|timed out|failed to recv|recvvalue failed|"
    r"was sent more than it waits for|is gone: it left the group|died (before or in|while the group)|was stopped by|"
    r"is broken since",
    re.IGNORECASE,
)


class RankError(RuntimeError):
    """A rank failed. `rank` is the first one that did; `exitcode` its exit status if it ended without a traceback."""

    def __init__(self, text: str, rank: int | None = None, exitcode: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        self.exitcode = exitcode


class RankTimeout(RankError):
    """The ranks did not finish in time, or wait for a rank that can no longer come."""


@dataclass(frozen=True)
class Death:
    """A rank that ended without a report: its exit code (negative: killed by that signal) and when it was noticed."""

    exitcode: int
    time: float
    arrived: bool = True  # False: it ended while it imported the script, before anything of ours ran

    def __str__(self) -> str:
        if self.exitcode >= 0 and not self.arrived:
            return f"ended with exit code {self.exitcode} while it imported the script; what it said stands above"
        if self.exitcode >= 0:
            return f"ended with exit code {self.exitcode} before its function returned (os._exit?)"
        try:
            name = signal.Signals(-self.exitcode).name
        except ValueError:
            name = f"signal {-self.exitcode}"
        return f"was killed by {name} (exit code {self.exitcode})"


def is_consequence(message: str) -> bool:
    """Tells whether an error only says that another rank is gone.

    >>> is_consequence("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), is_consequence("shapes differ")
    (True, False)
    """
    return _CONSEQUENCE.search(message) is not None


def root_cause(ends: Mapping[int, RankReport | Death]) -> int | None:
    """Returns the rank that failed first, None if none did.

    Errors that only say that another rank is gone count after all others.

    >>> gone = RankReport("error", 1.0, text="Connection closed by peer", consequence=True)
    >>> root_cause({0: gone, 1: Death(-9, 1.1), 2: RankReport("done", 0.5)})
    1
    """
    failed = {rank: end for rank, end in ends.items() if isinstance(end, Death) or end.kind == "error"}
    if not failed:
        return None
    return min(failed, key=lambda r: (getattr(failed[r], "consequence", False), failed[r].time))


def failure(
    what: str, nproc: int, ends: Mapping[int, RankReport | Death], boards: Mapping[int, FlightEntry]
) -> RankError:
    """Builds the error of a run in which a rank failed: the root cause first, then the others in a line each."""
    first = root_cause(ends)
    assert first is not None
    end = ends[first]
    if isinstance(end, Death):
        parts = [f"{what}: rank {first} of {nproc} {end}", where(first, boards)]
    else:
        parts = [f"{what}: rank {first} of {nproc} failed first\n\n{end.text.rstrip()}"]
        if end.consequence:
            parts.append(f"This says that another rank has gone. {describe(boards)}")
    parts.append(_others(first, nproc, ends))
    return RankError("\n\n".join(filter(None, parts)), first, end.exitcode if isinstance(end, Death) else None)


def timeout(
    what: str,
    seconds: float,
    waiting: Sequence[int],
    boards: Mapping[int, FlightEntry],
    stacks: Mapping[int, str],
    now: float,
) -> RankTimeout:
    """Builds the error of a run that hung: who waits for whom, then where each rank is."""
    parts = [f"{what}: {rank_text(waiting)} did not finish within {seconds:g} s"]
    return _hang(parts, boards, stacks, now)


def deadlock(
    what: str, missing: Sequence[int], boards: Mapping[int, FlightEntry], stacks: Mapping[int, str], now: float
) -> RankTimeout:
    """Builds the error of a run in which ranks wait for `missing`, whose function has already returned."""
    verb = "has" if len(missing) == 1 else "have"
    parts = [f"{what}: deadlock, others wait for {rank_text(missing)}, which {verb} already returned"]
    return _hang(parts, boards, stacks, now)


def _hang(parts: list[str], boards: Mapping[int, FlightEntry], stacks: Mapping[int, str], now: float) -> RankTimeout:
    parts.append(describe(boards, now))
    parts += [f"--- stack of rank {rank}\n{stack.rstrip()}" for rank, stack in sorted(stacks.items())]
    return RankTimeout("\n\n".join(parts))


def where(rank: int, boards: Mapping[int, FlightEntry]) -> str:
    """The last collective of a rank that is dead."""
    entry = boards.get(rank)
    if entry is None or entry.seq == 0:
        return "It had entered no collective."
    return f"It was in {entry}." if entry.inside else f"It was in no collective; it had last left {entry}."


def _others(first: int, nproc: int, ends: Mapping[int, RankReport | Death]) -> str:
    lines = []
    for rank, end in sorted(ends.items()):
        if rank != first and isinstance(end, Death):
            lines.append(f"then rank {rank} {end}")
        elif rank != first and isinstance(end, RankReport) and end.kind == "error":
            lines.append(f"then rank {rank}: {end.text.strip().splitlines()[-1]}")
    returned = [rank for rank, end in sorted(ends.items()) if isinstance(end, RankReport) and end.kind == "done"]
    running = [rank for rank in range(nproc) if rank not in ends]
    if returned:
        lines.append(f"{rank_text(returned)} had returned")
    if running:
        lines.append(f"{rank_text(running)} still ran and {'was' if len(running) == 1 else 'were'} ended")
    return "\n".join(lines)
