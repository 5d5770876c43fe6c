"""`onecard run`: the launcher, and ahead of it, with ``--auto``, the plan of a program for one card."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import tyro

from onecard.auto.apply import check
from onecard.auto.rank import Job
from onecard.commands.find import find
from onecard.commands.front import Flag, parsed, print_json
from onecard.errors import OnecardError
from onecard.launch._explain import say
from onecard.launch._main import main as launch
from onecard.launch._main import plan as ranks_of
from onecard.launch._options import LaunchError, Options, Target, parse
from onecard.launch._torchrun import LONE


class Asked:
    """The words of a command line that are ours and not the launcher's.

    Attributes:
        auto: whether the program is one for one card; plan: the file of its plan, if one is given.
        dry: whether the plan is printed, and nothing runs; into: the file that it is written to.
        machine, memory: on what it is priced: a name or a file; GiB of each rank.
        explain: whether rank 0 tells its messages.
        rest: the launcher's words.

    Example:
        >>> asked = Asked(["--auto", "plan.json", "--nproc_per_node", "4", "train.py", "--auto"])
        >>> asked.auto, asked.plan, asked.rest
        (True, 'plan.json', ['--nproc_per_node', '4', 'train.py', '--auto'])
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.auto = self.dry = self.explain = False
        self.plan = self.into = self.machine = ""
        self.memory = 0.0
        self.rest: list[str] = []
        words = list(argv)
        while words and words[0].startswith("-") and words[0] != "-m":
            word, _, value = words.pop(0).partition("=")
            name = word.lstrip("-").replace("-", "_")
            if name == "auto":
                self.auto, self.plan = True, value or self._file(words)
            elif name == "dry_run":
                self.dry, self.into = True, value or self._file(words)
            elif name == "explain" and not value:
                self.explain = True
            elif name in ("machine", "memory"):
                value = value or (words.pop(0) if words else "")
                self._take(name, value)
            else:
                alone = value or name in LONE
                self.rest += [f"{word}={value}"] if value else [word] if alone else [word, *words[:1]]
                words = words if alone else words[1:]
        self.rest += words
        if (self.dry or self.machine or self.memory) and not self.auto:
            raise LaunchError(
                "--dry_run, --machine and --memory are of a program for one card: onecard run --auto --dry_run ..."
            )

    def _file(self, words: list[str]) -> str:
        return words.pop(0) if words and words[0].endswith(".json") else ""

    def _take(self, name: str, value: str) -> None:
        if name == "machine":
            self.machine = value
            return
        try:
            self.memory = float(value)
        except ValueError:
            raise LaunchError(f"--memory is {value!r}; write GiB of one rank: --memory 24") from None


@dataclass(frozen=True)
class RunOptions(Options):
    """Run a training script on several ranks, one process each; with --auto one that was written for one card.

    Usage: onecard run [options] script.py [arguments], or with -m module in place of script.py. What follows the
    script belongs to the script, unchanged. The exit status is that of the first rank that failed.
    """

    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="script.py", help_behavior_hint="")] = ""
    """What runs, followed by its own arguments; -m module runs a module."""

    auto: Annotated[str | None, tyro.conf.arg(metavar="[plan.json]", help_behavior_hint="")] = None
    """Divides the work of a script for one card, not one line changed: by the plan, or by the fastest one that fits."""

    dry_run: Annotated[str | None, tyro.conf.arg(metavar="[plan.json]", help_behavior_hint="")] = None
    """With --auto: prints that plan, writes it to a file, runs nothing."""

    machine: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """With --auto: what the plan is priced on: A100, H100, H200, here, or machine.json."""

    memory: Annotated[float | None, tyro.conf.arg(metavar="GIB", help_behavior_hint="")] = None
    """With --auto: what a rank may take."""

    explain: Flag = False
    """Prints each message of rank 0's second step, while it runs: what needs it, at which line, how many bytes."""


def options() -> type:
    """The options as help and shells have them; the words are read by hand, as the script's are its own."""
    return RunOptions


def main(argv: Sequence[str]) -> int:
    """Runs the program named on the command line; returns its exit status, 2 for what cannot be."""
    if argv[:1] in (["-h"], ["--help"]):
        parsed(options(), ["--help"], "run")
    try:
        asked = Asked(argv)
        job = _job(asked) if asked.auto else None
    except (LaunchError, OnecardError) as error:
        say(str(error))
        return 2
    if asked.auto and job is None:
        return 0
    told = {"ONECARD_EXPLAIN": "1"} if asked.explain else {}
    if job is not None:
        told |= {"ONECARD_AUTO": job.to_json(), "PYTHONHASHSEED": "0"}
    with patch.dict(os.environ, told):
        return launch(asked.rest if told else argv)


def _compiled(target: Target) -> None:
    """
    Raises:
        LaunchError: the script is no Python; said before anything is looked for, or started.
    """
    if target.is_module:
        return
    try:
        compile(Path(target.name).read_bytes(), target.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as fault:
        where = f"{target.name}:{getattr(fault, 'lineno', None) or 1}"
        raise LaunchError(f"{where}: no Python: {getattr(fault, 'msg', fault)}; nothing was started") from None


def _job(asked: Asked) -> Job | None:
    """What the ranks are told; None if the plan was asked for alone."""
    options, target = parse(asked.rest)
    ranks = ranks_of(options)[0] * options.nnodes
    _compiled(target)
    if asked.plan:
        job = Job.read(asked.plan)
    else:
        job = find(target, ranks, asked.machine, asked.memory)
    check(job.plan, ranks)
    if asked.into:
        Path(asked.into).write_text(job.to_json(), encoding="utf-8")
    if asked.dry:
        if options.json:
            print_json(json.loads(job.to_json()))
        return None
    return replace(job, seed=random.SystemRandom().getrandbits(32), since=time.time())
