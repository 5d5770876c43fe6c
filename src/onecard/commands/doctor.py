"""`onecard doctor`: what this machine can do, what is slow or broken, and the repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from onecard.commands.front import FINE, NO, Flag, answered, parsed, print_json
from onecard.doctor.facts import look
from onecard.doctor.judge import STATES, Answer, judge

if TYPE_CHECKING:  # rich is loaded by what prints
    from rich.console import Group

VERSION = 1
_STYLES = {"fine": "green", "slow": "yellow", "risk": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Asked:
    """What this machine can do: torch, GPUs, memory, cores, network, allocator, limits; what is slow, and the repair of each.

    Nothing is changed or measured. The exit status is 1 if something is broken. Run it where ranks will run: in the container,
    under the scheduler, on each host.
    """

    json: Flag = False
    """all facts and findings as JSON, in place of the table"""


def main(argv: Sequence[str]) -> int:
    """Looks at this machine, prints what is found, and returns the exit status."""
    asked = parsed(Asked, argv, "doctor")
    return answered("doctor", lambda: _run(asked))


def _run(asked: Asked) -> int:
    facts = look()
    findings = judge(facts)
    if asked.json:
        found = [finding.data() for finding in findings]
        print_json({"onecard": "Doctor", "version": VERSION, "findings": found, "facts": asdict(facts)})
    else:
        _show(findings)
    return NO if any(finding.state == "broken" for finding in findings) else FINE


def _show(findings: Sequence[Answer]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    wide = console if console.is_terminal else Console(highlight=False, width=120)
    wide.print(_page(findings))


def _page(findings: Sequence[Answer]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(3):
        made.add_column(overflow="fold")
    for finding in findings:
        made.add_row(finding.subject, Text(finding.state, _STYLES[finding.state]), Text(finding.text))
        if finding.repair:
            made.add_row("", "", Text(f"-> {finding.repair}", "bold"))
    counts = Counter(finding.state for finding in findings)
    return Group(made, ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]))
