"""`onecard estimate`: what a step of an unchanged program takes, without devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor, nn

from onecard.commands.front import answered, check_rank, check_script, divided, parsed, print_json
from onecard.commands.here import measured_for
from onecard.commands.options import Outputs, plan_file
from onecard.commands.simulate import show, write
from onecard.commands.waiting import waiting
from onecard.errors import OnecardError, PlanError
from onecard.launch.rehearsal.rehearse import RehearsalError, rehearse, said
from onecard.launch.rehearsal.replicated import Replicated
from onecard.machine.cost import Machine
from onecard.machine.events import Panel, write_trace
from onecard.planning.job import JobCost
from onecard.planning.machine_file import machine_named
from onecard.planning.plan import Plan
from onecard.planning.price import price
from onecard.planning.program import HeardProgram
from onecard.reports.rank_step import RankStep, rank_step


@dataclass(frozen=True)
class Asked:
    """What a step of a program takes, without devices: it runs as one rank of any world, up to its second optimizer step.

    Usage: onecard estimate train.py --world 1024 --machine H100 -- arguments of the script.
    """

    script: tyro.conf.Positional[Path]
    """the program, unchanged"""
    world: Annotated[int | None, tyro.conf.arg(metavar="RANKS", help_behavior_hint="(default: 1)")] = None
    """ranks that it is told of"""
    rank: int = 0
    """which of them it is"""
    machine: str = "H100"
    """A100, H100, H200, here (this one is measured), or machine.json"""
    per_host: int = 8
    """ranks on a host"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """plan.json: prices the model of a program for one card as it would run so, instead of the program as it is"""
    output: tyro.conf.OmitArgPrefixes[Outputs] = field(default_factory=Outputs)


def main(argv: Sequence[str]) -> int:
    """Runs a program up to its second step and prints what it takes; returns the exit status.

    It is 2 for what cannot be, also where the program cannot be run so: then a line says which of its lines stopped it.
    """
    ours, script = divided(argv)
    asked = parsed(Asked, ours, "estimate")
    return answered("estimate", lambda: _run(asked, script))


def _run(asked: Asked, script: list[str]) -> int:
    _check(asked)
    with waiting("pricing") as say:
        if asked.machine == "here":
            say("measuring this machine")
        machine = replace(machine_named(asked.machine, measured_for(asked.world or 1)), per_host=asked.per_host)
        say(f"running {asked.script} up to its second step")
        found: JobCost | RankStep
        if asked.plan is not None:
            found, findings = _planned(asked, plan_file(asked.plan), machine, script)
        else:
            found, findings = _as_it_is(asked, machine, script)
    if isinstance(found, JobCost):
        write(found, asked.output, asked.script.name, findings)
    else:
        _write(found, asked.output, findings)
    return 0


def _check(asked: Asked) -> None:
    check_script(asked.script)
    check_rank(1 if asked.world is None else asked.world, asked.rank)
    asked.output.check()
    if asked.per_host < 0:
        raise PlanError(f"--per_host {asked.per_host}; ranks on a host, 0 if all are on one")
    if asked.plan is None and asked.output.html is not None:
        raise PlanError(
            "--html shows all kinds of ranks of a plan: give --plan plan.json too, or --trace step.json for this rank"
        )


def _as_it_is(asked: Asked, machine: Machine, script: list[str]) -> tuple[RankStep, list[str]]:
    """The program with what it says itself of ranks."""
    world = asked.world or 1
    found, cost = rehearse(asked.script, script, world, asked.rank, machine)
    notes = []
    if world > 1 and not cost.sent:
        notes.append(
            f"the program sends nothing: the other {world - 1:,} ranks do the same work, or none; --plan says how they would"
        )
    if found.unpriced:
        notes.append(f"messages without a price: {', '.join(found.unpriced)}")
    return rank_step(found.step, cost, asked.rank, world, found.kinds, found.gradients), notes


def _planned(asked: Asked, plan: Plan, machine: Machine, script: list[str]) -> tuple[JobCost, list[str]]:
    """A program for one card, under a plan."""
    if asked.world not in (None, plan.world):
        raise PlanError(f"--world {asked.world}, but {asked.plan} is for {plan.world} ranks: leave --world out")
    if plan.tp * plan.cp > 1 and not plan.placements:
        raise PlanError(
            f"{asked.plan}: tp={plan.tp}, cp={plan.cp}: how parameters lie is not said, and a program for one card does not say "
            'it; give placements, such as [["*.q_proj.weight", "tp: Shard(0)"]]'
        )
    program = HeardProgram((Replicated,))
    rehearse(asked.script, script, 1, 0, machine, program)
    model, batch, loss = program.parts()
    try:
        notes = [*filter(None, [program.told()]), *_otherwise(plan, model, batch)]
        return price(model, plan, machine, batch=batch, loss=loss), notes
    except OnecardError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as fault:
        raise RehearsalError(
            f"{asked.script}: its model does not run on {plan.microbatch} rows of a microbatch: {said(fault)}"
        ) from fault


def _otherwise(plan: Plan, model: nn.Module, batch: Sequence[Tensor]) -> list[str]:
    """What the plan says of a step that is not as the program has it: the price is the plan's."""
    notes = []
    kept = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    if kept and kept != [plan.parameters]:
        notes.append(
            f"the program's parameters are {', '.join(kept)}; priced are the plan's, {plan.parameters}. `onecard run --auto` "
            f"keeps the program's: a plan with parameters={kept[0]!r}, compute={kept[0]!r} prices these"
        )
    rows = next((len(x) for x in batch if x.ndim), plan.batch)
    if rows != plan.batch:
        notes.append(
            f"a step of the plan has {plan.batch:,} rows, dp x microbatch x microbatches; the program's batch has {rows:,}"
        )
    return notes


def _write(found: RankStep, outputs: Outputs, findings: Sequence[str]) -> None:
    if outputs.json:
        print_json(found.data() | {"notes": findings})
    else:
        show(found, findings)
    if outputs.trace is not None:
        cost = found.cost
        alive = tuple((node.start + node.seconds, float(node.alive)) for node in cost.nodes)
        events = tuple(event for event in cost.events(found.rank) if event.seconds)
        write_trace(
            outputs.trace,
            [Panel(f"rank {found.rank} of {found.world}: {cost.machine.name}", events, (("bytes alive", alive),))],
        )


__all__ = ["Asked", "divided", "main"]
