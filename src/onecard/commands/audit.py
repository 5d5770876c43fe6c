"""`onecard audit`: from the command line to an exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from onecard.commands.front import Flag, answered, parsed
from onecard.commands.options import Pairs, model_fields, pairs, typed
from onecard.commands.waiting import waiting
from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.planning.audit.audit import Audit, Given
from onecard.planning.audit.read import read
from onecard.planning.audit.report import LIBRARIES, as_json, page, price_page
from onecard.planning.audit.worth import Worth, worth
from onecard.planning.audit.write import write
from onecard.planning.machine_file import machine_named
from onecard.planning.transformer import Transformer


@dataclass(frozen=True)
class Asked:
    """Read how another library runs a job, and say what is wrong with it.

    Usage: onecard audit train.sh (Megatron-LM), ds_config.json config.json (DeepSpeed and Hugging Face), train.toml (torchtitan),
    fsdp.yaml config.json (accelerate), or plan.json (onecard). The status is 1 if there are mistakes, 2 if a file cannot be read.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")] = ()
    """The files of one job."""

    world: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """How many ranks there are, where no file says it."""

    per_host: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Ranks on one host."""

    sequence: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Tokens of a sequence, where no file says it."""

    define: Pairs = ()
    """A variable of the shell that a script takes from its environment; may be given several times."""

    set: Pairs = ()
    """A field of onecard.Plan or onecard.Transformer, which counts more than the files; may be given several times."""

    verbose: Flag = False
    """Each setting with its meaning, and each that was ignored."""

    machine: str = "H100"
    """What it runs on: A100, H100, H200, here (this one is measured), or machine.json."""

    price: Flag = True
    """What a step takes, in time and memory."""

    search: Flag = True
    """Which change of the plan would gain most; prices one after the other, for a minute at most."""

    json: Flag = False
    """The result as JSON."""

    to: Annotated[
        Literal["megatron", "deepspeed", "torchtitan", "fsdp"] | None, tyro.conf.arg(help_behavior_hint="")
    ] = None
    """Write the plan as a file of another library, on standard output."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """The model's sizes: a Hugging Face config.json, a onecard.Transformer as JSON, or a name: llama3-70b, gpt3-175b, ..."""


def options() -> type:
    """The options."""
    return Asked


def main(argv: Sequence[str] | None = None) -> int:
    """Audits, or writes, what is named on the command line, and returns the exit status."""
    asked = parsed(Asked, sys.argv[1:] if argv is None else argv, "audit")
    return answered("audit", lambda: _run(asked))


def _run(options: Asked) -> int:
    if not options.files:
        raise PlanError("name a file, such as: onecard audit train.sh")
    for file in options.files:
        if file.suffix == ".py" and file.is_file():
            raise PlanError(
                f"{file} is a program, and audit reads settings; for what it takes: onecard estimate {file}"
            )
    given = given_of(options)
    if options.to is not None:
        return _write(options, given)
    audit = read(options.files, given)
    found = _priced(options, audit) if options.price else None
    if options.json:
        print(json.dumps(as_json(audit) | ({"price": found.as_json()} if found is not None else {}), indent=2))
        return 1 if audit.mistakes else 0
    shown = console()
    shown.print(page(audit, options.verbose))
    if found is not None:
        shown.print()
        shown.print(price_page(found))
    return 1 if audit.mistakes else 0


def _priced(options: Asked, audit: Audit) -> Worth:
    with waiting(f"pricing {audit.plan.world:,} ranks") as say:
        if options.machine == "here":
            say("measuring this machine")
        return worth(audit, machine_named(options.machine, Machine.measure), options.search, say)


def console() -> Console:
    """The terminal; where there is none, lines as long as they have to be."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=max(made.width, 130))


def given_of(options: Asked) -> Given:
    """What the command line says beside the files."""
    for name in ("world", "per_host", "sequence"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 2**40:
            raise PlanError(f"--{name.replace('_', '-')} is {value}; want a number of ranks, 1 or more")
    change = {name: typed(name, value) for name, value in pairs("set", options.set).items()}
    define = pairs("define", options.define)
    model = Transformer(**model_fields(options.model, options.sequence or 0)) if options.model is not None else None
    return Given(options.world, options.per_host, options.sequence, define, change, model)


def _write(options: Asked, given: Given) -> int:
    """The file on standard output, what it cannot say on standard error."""
    source = read(options.files, given)
    made = write(str(options.to), source.plan, source.transformer)
    sys.stdout.write(made.text)
    for words in made.cannot.values():
        print(f"onecard: {words}", file=sys.stderr)
    for found in source.mistakes:
        print(f"onecard: {LIBRARIES[source.library]}: {found}", file=sys.stderr)
    return 0
