"""`onecard explain`: the messages of a program's step, without devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from onecard.commands.front import (
    FINE,
    NO,
    Flag,
    answered,
    check_least,
    check_rank,
    check_script,
    divided,
    parsed,
    print_json,
)
from onecard.commands.here import measured_for
from onecard.commands.waiting import waiting
from onecard.launch.rehearsal.rehearse import rehearse
from onecard.planning.machine_file import machine_named
from onecard.reports.step_messages import StepMessages, step_messages


@dataclass(frozen=True)
class Asked:
    """Every message of a program's step, with the line and the operator that need it. It runs without devices, as one rank.

    Usage: onecard explain train.py --world 8 -- arguments of the script. With --forbid the exit status is 1 if there is a
    message that the program did not ask for: a check for CI.
    """

    script: tyro.conf.Positional[Path]
    """the program, unchanged"""
    world: int = 2
    """ranks that it is told of"""
    rank: int = 0
    """which of them it is"""
    machine: str = "H100"
    """what messages are priced on: A100, H100, H200, here (this one is measured), or machine.json"""
    per_host: int = 8
    """ranks on a host"""
    forbid: Flag = False
    """status 1 for messages that operators need and the program did not ask for; each is named with its line"""
    at_most: Annotated[int | None, tyro.conf.arg(metavar="BYTES", help_behavior_hint="")] = None
    """status 1 if a step of this rank sends more bytes"""
    json: Flag = False
    """all messages as JSON, in place of the table"""


def main(argv: Sequence[str]) -> int:
    """Runs a program up to its second step, prints that step's messages, and returns the exit status."""
    ours, words = divided(argv)
    asked = parsed(Asked, ours, "explain")
    return answered("explain", lambda: _run(asked, words))


def _run(asked: Asked, words: list[str]) -> int:
    check_script(asked.script)
    check_rank(asked.world, asked.rank)
    check_least(0, at_most=asked.at_most, per_host=asked.per_host)
    with waiting("explaining") as say:
        if asked.machine == "here":
            say("measuring this machine")
        machine = replace(machine_named(asked.machine, measured_for(asked.world)), per_host=asked.per_host)
        say(f"running {asked.script} up to its second step")
        found, cost = rehearse(asked.script, words, asked.world, asked.rank, machine)
        messages = step_messages(found.step, cost, found.asked, asked.rank, asked.world)
    if asked.json:
        print_json(messages.data())
    else:
        _show(messages)
    for name in found.unpriced:
        print(f"onecard explain: {name} has no price, and is not listed", file=sys.stderr)
    return _verdict(asked, messages)


def _show(messages: StepMessages) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    wide = console if console.is_terminal else Console(highlight=False, width=170)
    wide.print(messages)


def _verdict(asked: Asked, messages: StepMessages) -> int:
    status = FINE
    if asked.forbid:
        for sent in messages.implicit:
            status = NO
            print(
                f"onecard explain: {sent.line}: {sent.operator} needs {sent.collective} of {sent.bytes:,} bytes along "
                f"{sent.axis!r}, which the program did not ask for: {sent.why}",
                file=sys.stderr,
            )
    total = sum(messages.by_axis.values())
    if asked.at_most is not None and total > asked.at_most:
        status = NO
        print(f"onecard explain: {total:,} bytes are sent, more than --at_most {asked.at_most:,}", file=sys.stderr)
    return status
