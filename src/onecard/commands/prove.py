"""`onecard prove`: whether a program computes on several ranks what it computes on one card; where not, the line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onecard.commands.estimate import divided
from onecard.commands.simulate import refuse
from onecard.commands.waiting import waiting
from onecard.errors import OnecardError
from onecard.proof.api import prove
from onecard.proof.script import Script


@dataclass(frozen=True)
class Asked:
    """Whether a program computes on several ranks what it does on one card: all of them run in this process.

    Usage: onecard prove train.py --world 8 -- arguments of the script. The exit status is 0 only if both are equal.
    """

    script: tyro.conf.Positional[Path]
    """the program, unchanged"""
    world: Annotated[int, tyro.conf.arg(metavar="RANKS", help_behavior_hint="(default: 2)")] = 2
    """ranks that it runs on"""
    steps: int = 2
    """optimizer steps after which it ends; 0: at its own end"""
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """the program for one card; by default the same one, in a world of one"""
    show: bool = False
    """what the program prints, of every rank"""


def main(argv: Sequence[str]) -> int:
    """Proves a program and prints what was found; returns the exit status: 0 equal, 1 not equal, 2 for what cannot be."""
    ours, words = divided(argv)
    asked = tyro.cli(Asked, args=ours, prog="onecard prove", use_underscores=True)
    try:
        script = Script(asked.script, words, quiet=not asked.show)
        one = None if asked.against is None else Script(asked.against, words, quiet=not asked.show)
        with waiting("proving") as say:
            say(f"running {asked.script} on one card and on {asked.world} ranks")
            proof = prove(script, world=asked.world, against=one, steps=asked.steps)
    except OnecardError as error:
        return refuse("prove", error)
    print(proof.text(), file=sys.stdout)
    return 0 if proof else 1
