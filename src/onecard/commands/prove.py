"""`onecard prove`: whether a program computes on several ranks what it computes on one card; where not, the line."""

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
    check_output,
    check_rank,
    check_script,
    divided,
    parsed,
    print_json,
)
from onecard.commands.waiting import waiting
from onecard.errors import ProofError
from onecard.planning.plan import Plan
from onecard.proof.api import prove
from onecard.proof.report import Proof
from onecard.proof.script import Script
from onecard.proof.small import flags, narrowed, said_of

LEAST = 5
"""Calls of a recorded step: one as it is, one that is recorded, and replays."""


@dataclass(frozen=True)
class Asked:
    """Whether a program computes on several ranks what it does on one card: all of them run in this process.

    Usage: onecard prove train.py --world 8 -- arguments of the script. The exit status is 0 only if both are equal.
    """

    script: tyro.conf.Positional[Path]
    """the program, unchanged"""
    world: Annotated[int | None, tyro.conf.arg(metavar="RANKS", help_behavior_hint="(default: the plan's, or 2)")] = (
        None
    )
    """ranks that it runs on"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """a plan by which they run a program for one card, as `onecard run --auto` does"""
    steps: int = 2
    """optimizer steps after which it ends; 0: at its own end. Of recordings: calls of recorded steps, 5 at least"""
    wide: bool = False
    """widths that the script's command line names stay; else they, batch and vocabulary become as small as leaves remainders"""
    narrow: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME[=SIZE]", help_behavior_hint="")] = ()
    """other flags of the script that are widths, and their sizes instead; without a size the least that divides alike"""
    start: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """a checkpoint of oc.checkpoint.save, by any mesh, with which its model and optimizer begin on one card and on all ranks"""
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """the program for one card; by default the same one, in a world of one"""
    processes: bool = False
    """each rank is a process: for programs that cannot share one"""
    recorded: bool = False
    """steps of to_static are recorded and replayed on the ranks, by their passes"""
    bisect: bool = False
    """the same, and which pass is at fault if they are not equal"""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """write the report as one HTML file, too"""
    json: Flag = False
    """all that was found as JSON, in place of the report"""
    show: bool = False
    """what the program prints, of every rank"""


def main(argv: Sequence[str]) -> int:
    """Proves a program and prints what was found; returns the exit status: 0 equal, 1 not equal, 2 for what cannot be."""
    ours, words = divided(argv)
    asked = parsed(Asked, ours, "prove")
    return answered("prove", lambda: _run(asked, words))


def _run(asked: Asked, words: Sequence[str]) -> int:
    for script in filter(None, (asked.script, asked.against)):
        check_script(script)
    if asked.world is not None:
        check_rank(asked.world, 0)
    check_least(0, steps=asked.steps)
    check_output("html", asked.html)
    proof = _proof(asked, words)
    if asked.html is not None:
        proof.html(asked.html, asked.script.name)
    if asked.json:
        print_json(proof.data())
    else:
        print(proof.text(), file=sys.stdout)
    return FINE if proof else NO


def _proof(asked: Asked, words: Sequence[str]) -> Proof:
    """The proof with small widths; where the program fails so, with its own."""
    ranks = asked.world or (Plan.load(asked.plan).world if asked.plan is not None else 2)
    words, less = narrowed(words, asked.narrow, ranks), dict[str, tuple[int, int]]()
    if not asked.wide and asked.start is None:  # a checkpoint has its own widths
        small, less = flags(words, ranks)
    if not less:
        kept = "" if asked.wide or asked.narrow or asked.start is not None else _NONE
        return replace(_ran(asked, words), widths=kept)
    try:
        return replace(_ran(asked, small), widths=said_of(less))
    except ProofError as fault:
        why = f"widths as they are: with smaller ones {str(fault).splitlines()[0]}"
    return replace(_ran(asked, words), widths=why)


_NONE = "widths as they are: the command line names none that could be smaller; --narrow NAME=SIZE says which are"


def _ran(asked: Asked, words: Sequence[str]) -> Proof:
    script = Script(asked.script, words, quiet=not asked.show)
    one = None if asked.against is None else Script(asked.against, words, quiet=not asked.show)
    recorded = asked.recorded or asked.bisect
    steps = max(asked.steps, LEAST) if recorded and asked.steps else asked.steps
    with waiting("proving") as say:
        say(f"running {asked.script} on one card and on all ranks")
        return prove(
            script, world=asked.world, against=one, plan=asked.plan, steps=steps, recorded=recorded, bisect=asked.bisect,
            processes=asked.processes, start=asked.start,
        )  # fmt: skip
