"""`onecard simulate`: what a step of a job takes, from a model's sizes and a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from onecard.commands.front import answered, parsed, print_json, refuse
from onecard.commands.options import (
    FLAGS,
    SIZES,
    Outputs,
    flags_of,
    model_fields,
    model_of,
    plan_fields,
    plan_of,
    said,
    whole_number,
)
from onecard.commands.waiting import waiting
from onecard.errors import PlanError
from onecard.machine.cost import Machine
from onecard.planning.job import JobCost
from onecard.planning.machine_file import machine_named
from onecard.planning.page import MEANS
from onecard.planning.plan import Plan
from onecard.planning.price import price
from onecard.planning.transformer import Transformer


@dataclass(frozen=True)
class Asked:
    """What is asked for."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """config.json of Hugging Face, or a name: llama3-70b, gpt3-175b, ..."""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """plan.json, as Plan.save writes it; flags go before it"""
    machine: str = "H100"
    """A100, H100, H200, here (this one is measured), or machine.json"""
    world: Annotated[int | None, tyro.conf.arg(metavar="RANKS", help_behavior_hint="")] = None
    """all ranks; dp is what tp, cp and pp leave of them"""
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS", help_behavior_hint="")] = None
    """sequences of a step; microbatches are what dp leaves of them"""


def main(argv: Sequence[str]) -> int:
    """Prices a job and prints it; returns the exit status, 2 for what cannot be.

    >>> main("--layers 4 --hidden 64 --heads 4 --vocab 256 --sequence 32 --dp 2 --machine A100".split())
    2 ranks (dp=2), A100: ...
    ...
    0
    """
    return answered("simulate", lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    asked, outputs, sizes, plan = read(argv)
    outputs.check()
    mistakes = [finding for finding in plan.check(sizes) if finding.kind == "mistake"]
    if mistakes:
        return refuse("simulate", "\n".join(map(str, mistakes)))
    with waiting(f"pricing {asked.model or 'the model'} on {plan.world:,} ranks") as say:
        if asked.machine == "here":
            say("measuring this machine")
        machine = machine_named(asked.machine, Machine.measure)
        say(f"recording blocks and pricing them on {plan.world:,} ranks")
        job = price(sizes, plan, machine)
    write(job, outputs, asked.model or "", [str(finding) for finding in plan.check(sizes)])
    return 0


def read(argv: Sequence[str]) -> tuple[Asked, Outputs, Transformer, Plan]:
    """The command line: what files say are the defaults of the flags."""
    if argv and argv[0].endswith(".py"):
        raise PlanError(f"{argv[0]} is a program, and simulate prices a model's sizes: onecard estimate {argv[0]}")
    if argv and not argv[0].startswith("-"):
        raise PlanError(f"{argv[0]}: the model is an option here: onecard simulate --model {argv[0]}")
    known = plan_fields(said(argv, "plan"))
    model = model_fields(said(argv, "model"), whole_number(argv, "sequence"))
    found: Any = parsed(options(known, model), argv, "simulate")
    asked: Asked = found.job
    return asked, found.output, model_of(found.model, model), plan_of(found.plan, known, argv, asked.world, asked.batch)


def options(plan: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None) -> type:
    """The options, with defaults by a plan and by a model's sizes."""
    flags = make_dataclass(
        "Simulate",
        [
            ("job", tyro.conf.OmitArgPrefixes[Asked]),
            ("model", _flat(flags_of(Transformer, "Sizes of the model.", [*SIZES], SIZES, model or {}))),
            ("plan", _flat(flags_of(Plan, "How it runs.", FLAGS, MEANS, plan or {}))),
            ("output", tyro.conf.OmitArgPrefixes[Outputs]),
        ],
    )
    flags.__doc__ = "What a step of a job takes: seconds, bytes and memory, without devices."
    return flags


def _flat(kind: Any) -> Any:
    flat: Any = tyro.conf.OmitArgPrefixes
    return flat[kind]


def show(job: Any, findings: Sequence[str] = ()) -> None:
    """Prints a job's table, and what is to be known of its plan."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(job)
    for finding in findings:
        console.print(f"note: {finding}", markup=False)


def write(job: JobCost, outputs: Outputs, title: str, findings: Sequence[str] = ()) -> None:
    """The answer, on standard output, and the files that are asked for."""
    from onecard.machine.events import write_trace
    from onecard.reports.job_data import job_data, panels

    if outputs.json:
        print_json(job_data(job) | {"notes": [*findings]})
    else:
        show(job, findings)
    if outputs.trace is not None:
        write_trace(outputs.trace, panels(job))
    if outputs.html is not None:
        from onecard.reports.job_page import write_page

        write_page(outputs.html, job, title)


__all__ = ["Asked", "main", "options", "read", "refuse", "show", "write"]
