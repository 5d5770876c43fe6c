"""`onecard plan`: the best way to run a script or a model on so many ranks, and why not the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from onecard.auto.rank import Job
from onecard.commands.find import searched
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
    refuse,
)
from onecard.commands.here import measured_for
from onecard.commands.options import Pairs, check_fixed, model_fields, pairs, typed
from onecard.commands.waiting import waiting
from onecard.errors import NothingFits, PlanError
from onecard.planning.job import bytes_in_words, seconds_in_words
from onecard.planning.machine_file import machine_named, this_machine
from onecard.planning.search.api import OBJECTIVES, plan
from onecard.planning.search.plans import Choice, Plans
from onecard.planning.search.words import in_words
from onecard.planning.transformer import Transformer
from onecard.reports.job_data import job_data

if TYPE_CHECKING:  # rich is loaded by what prints
    from rich.table import Table

VERSION = 1


@dataclass(frozen=True)
class Asked:
    """The best plan for a script or a model on so many ranks, and why not the others. Nothing of it runs on devices.

    Usage: onecard plan train.py --world 4 -o plan.json -- arguments of the script, then onecard run --auto plan.json train.py;
    or onecard plan llama3-8b --world 128 --batch 256 --machine H100. The exit status is 1 if nothing fits.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT|MODEL")]
    """a script for one card; or a model: config.json of Hugging Face, or a name: llama3-70b, gpt3-175b, ..."""
    world: int = 2
    """ranks"""
    machine: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """A100, H100, H200, here (this one is measured), or machine.json; by default this machine's GPU, of a model the H100"""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GIB", help_behavior_hint="")] = None
    """what a rank may take; by default what the machine has"""
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS", help_behavior_hint="")] = None
    """sequences of a step of a model; by default one for each rank. A script has its own batch"""
    sequence: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """tokens of a sequence of a model, where it is not the model's own number"""
    objective: Annotated[str, tyro.conf.arg(metavar="|".join(OBJECTIVES))] = "time"
    """the fastest plan, or the one that takes least memory"""
    fixed: Pairs = ()
    """a field of onecard.Plan that is given, such as tp=2; may be given several times"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")] = None
    """plan.json: the first plan, for onecard run --auto, estimate --plan and simulate --plan"""
    json: Flag = False
    """all plans that are shown as JSON, in place of the table"""


def main(argv: Sequence[str]) -> int:
    """Looks for a plan, prints what was found, and returns the exit status."""
    ours, words = divided(argv)
    asked = parsed(Asked, ours, "plan")
    return answered("plan", lambda: _run(asked, words))


def _run(asked: Asked, words: list[str]) -> int:
    check_least(1, batch=asked.batch, sequence=asked.sequence)
    if asked.memory is not None and not asked.memory > 0:
        raise PlanError(f"--memory {asked.memory:g}: want a number above 0; without it, as --help says")
    check_output("output", asked.output)
    check_rank(asked.world, 0)
    if asked.objective not in OBJECTIVES:
        raise PlanError(f"--objective {asked.objective}: want one of {', '.join(OBJECTIVES)}")
    fixed = {name: typed(name, value, "fixed") for name, value in pairs("fixed", asked.fixed).items()}
    check_fixed(fixed)
    script = asked.target.endswith(".py")
    try:
        with waiting(f"looking for a plan of {asked.target} on {asked.world:,} ranks") as say:
            if asked.machine == "here":
                say("measuring this machine")
            found, text = _script(asked, words, fixed) if script else _model(asked, fixed)
    except NothingFits as why:
        refuse("plan", why)
        return NO
    if asked.output is not None:
        asked.output.write_text(text, encoding="utf-8")
    if asked.json:
        print_json(_data(found))
    else:
        _show(found)
    return FINE


def _script(asked: Asked, words: list[str], fixed: Mapping[str, Any]) -> tuple[Plans, str]:
    """The plans of a script, and the file of the first one."""
    if asked.batch is not None or asked.sequence is not None:
        raise PlanError(
            "--batch and --sequence are of a model; a script has its own batch: give it its own arguments behind --"
        )
    check_script(Path(asked.target))
    on = machine_named(asked.machine, measured_for(asked.world)) if asked.machine else this_machine()
    found, names = searched(Path(asked.target), words, asked.world, on, asked.memory or 0.0, fixed, asked.objective)
    return found, Job(found.best, names).to_json()


def _model(asked: Asked, fixed: Mapping[str, Any]) -> tuple[Plans, str]:
    """The plans of a model by its sizes, and the file of the first one."""
    sizes = Transformer(**model_fields(asked.target, asked.sequence or 0))
    if asked.sequence:
        sizes = replace(sizes, sequence=asked.sequence)
    limit = int(asked.memory * 2**30) if asked.memory else None
    found = plan(
        sizes, world=asked.world, machine=machine_named(asked.machine or "H100", measured_for(asked.world)),
        batch=asked.batch or asked.world, memory=limit, fixed=fixed, objective=asked.objective,
    )  # fmt: skip
    return found, found.best.to_json()


def _show(found: Plans) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    wide = console if console.is_terminal else Console(highlight=False, width=150)
    wide.print(f"{in_words(found.best)}: {found.why}", markup=False)
    wide.print(_table(found))
    count = f"{found.recorded:,} recording{'s' * (found.recorded > 1)}"
    wide.print(f"{found.looked:,} plans looked at, {found.priced:,} priced, {count}")
    if found.told:
        wide.print(found.told, markup=False)


def _table(found: Plans) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table()
    for name in ("", "plan"):
        made.add_column(name)
    for name in ("a step", "memory"):
        made.add_column(name, justify="right")
    made.add_column("beside the first", overflow="fold")
    for i, choice in enumerate((*found.choices, *found.obvious)):
        shown = (choice.name, in_words(choice.plan), _time(choice), bytes_in_words(choice.cost.peak))
        made.add_row(*shown, Text(choice.why if i else "the plan to take"))
    return made


def _time(choice: Choice) -> str:
    return seconds_in_words(choice.cost.seconds) if choice.fits else "does not fit"


def _data(found: Plans) -> dict[str, Any]:
    """What is shown, as JSON can hold it."""
    return {
        "onecard": "Plans", "version": VERSION, "plan": json.loads(found.best.to_json()), "cost": job_data(found.cost),
        "why": found.why, "choices": [_choice(c) for c in found.choices], "obvious": [_choice(c) for c in found.obvious],
        "looked": found.looked, "priced": found.priced, "recorded": found.recorded, "limit": found.limit,
        "told": found.told,
    }  # fmt: skip


def _choice(choice: Choice) -> dict[str, Any]:
    cost = choice.cost
    return {
        "name": choice.name, "words": in_words(choice.plan), "seconds": cost.seconds, "peak": cost.peak, "fits": choice.fits,
        "why": choice.why, "plan": json.loads(choice.plan.to_json()),
    }  # fmt: skip
