"""What the launcher says of a job that failed: the rank that failed first, last on the terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from onecard.comm.base import flight
from onecard.launch._agent import Workplace
from onecard.launch._machines import Machines
from onecard.launch._say import say as say
from onecard.launch._watch import ADVICE
from onecard.testing._job import RankReport
from onecard.testing._report import Death, is_consequence, root_cause, where

TAIL = 20  # lines of a log shown for a rank that left no traceback
_MEMORY = {
    True: "the kernel killed it for want of memory: the machine, or this control group, had none left",
    False: "killed, perhaps by the kernel for want of memory (dmesg may tell), or by somebody's kill -9",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the exit status, and, if it failed, the rank that failed first, why, and its log."""

    status: int
    rank: int | None = None
    why: str = ""
    log: Path | None = None


def explain(
    failures: Mapping[int, ProcessFailure],
    workplace: Workplace,
    out_of_memory: bool = False,
    machines: Machines | None = None,
) -> Ended:
    """Shows the first failure, last on the terminal, and returns it."""
    ends = {rank: end for rank, end in _ends(failures, workplace).items() if end is not None}
    first = root_cause(ends)
    assert first is not None
    log, end = workplace.log(first), ends[first]
    # A rank that noted its own end may have been ended by the agent while it was leaving.
    code = end.code if isinstance(end, RankReport) else failures[first].exitcode
    boards = workplace.watch.boards(sorted(workplace.ranks.values()))
    if isinstance(end, RankReport) and end.text:
        how, text = f"failed first, with exit code {code}", end.text.rstrip()
    else:
        how = f"{Death(code, 0.0)}{_killer(code, out_of_memory)}" if code < 0 else f"ended first, with exit code {code}"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        text = "\n".join(["The end of its log:", *lines[-TAIL:]]) if lines else "It had printed nothing."
        if code < 0 and first in boards:
            text += f"\n\n{where(first, boards)}"
    if isinstance(end, Death) or end.consequence:
        text += _unlike(boards)
    others = isinstance(end, RankReport) and end.consequence
    whose = machines.blame() if machines is not None and others else ""
    who, places = f"rank {first}", ""
    if machines is not None:
        who, places = f"{who} on {machines.here}", f". {machines.places()}"
    if whose:
        how, text = (
            f"lost its connection; its log is {log}{places}\n\n{text}",
            f"Not this machine's fault, as it seems: {whose}",
        )
        say(f"{who} {how}\n\n{text}")
    else:
        say(f"{who} {how}; its log is {log}{places}\n\n{text}")
    if machines is not None:
        machines.end(f"rank {first} {how.partition('; its log')[0]}: {text.splitlines()[-1]}", own=not others)
    return Ended(code if code > 0 else 128 - code, first, f"{how}\n\n{text}", log)


def _killer(code: int, out_of_memory: bool) -> str:
    return f": {_MEMORY[out_of_memory]}" if code == -signal.SIGKILL else ""


def _unlike(boards: Mapping[int, flight.FlightEntry]) -> str:
    """Whether the ranks were last in one message with different sizes: over Gloo that aborts them, and names no rank."""
    ranks = flight.out_of_step(boards, inside=False)
    return f"\n\nThe ranks were out of step:\n{flight.last_words(boards, ranks)}\n{ADVICE}" if ranks else ""


def _ends(failures: Mapping[int, ProcessFailure], workplace: Workplace) -> dict[int, RankReport | Death | None]:
    """How each failed rank ended; None for one that the agent itself ended because of another."""
    ends: dict[int, RankReport | Death | None] = {}
    others = {failure.exitcode for failure in failures.values()}
    for rank, failure in failures.items():  # in the order in which the agent noticed them
        try:
            note = json.loads(workplace.note(rank).read_text())
        except (OSError, ValueError):
            # A rank that SIGTERM ended is the agent's doing, if another rank ended in any other way.
            by_agent = failure.exitcode == -signal.SIGTERM and bool(others - {-signal.SIGTERM})
            # Noticed at the agent's next look only: any error that a rank noted itself was earlier.
            ends[rank] = None if by_agent else Death(failure.exitcode, float("inf"))
        else:
            lost = is_consequence(note["message"])
            ends[rank] = RankReport("error", note["time"], text=note["text"], consequence=lost, code=note["code"])
    return ends
