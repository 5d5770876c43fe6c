"""`onecard draw`: a program's step or a pipeline's schedule as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from onecard.commands.front import Flag, answered, check_output, check_rank, check_script, divided, parsed, print_json
from onecard.commands.waiting import waiting
from onecard.errors import PlanError
from onecard.launch.rehearsal.rehearse import rehearse
from onecard.machine.cost import MACHINE
from onecard.pipeline.schedule.action import Schedule
from onecard.pipeline.schedule.modes import MODES
from onecard.pipeline.schedule.modes import plan as schedule_of
from onecard.pipeline.schedule.timeline_pictures import draw_figure, draw_text, draw_trace
from onecard.pipeline.schedule.timing import simulate
from onecard.static.show.draw import draw
from onecard.static.show.folded import as_data


@dataclass(frozen=True)
class Asked:
    """A program's step as a picture: its modules, layouts and messages; or a pipeline's schedule.

    Usage: onecard draw train.py --world 4 -o graph.svg -- arguments of the script;
    onecard draw --schedule ZBV --stages 4 --microbatches 8 -o schedule.svg. Without -o, as text.
    """

    script: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PATH]", help_behavior_hint="")] = None
    """the program, unchanged; it runs without devices, up to its second step"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"], help_behavior_hint="")] = None
    """the file to write: .svg or .txt; a schedule also .png, .pdf (these need matplotlib) or .json (a trace)"""
    world: int = 2
    """ranks that the program is told of"""
    rank: int = 0
    """which of them it is"""
    depth: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """parts of a module's path that tell boxes apart; by default as many as fit"""
    schedule: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """a pipeline's schedule in place of a program: 1F1B, F-then-B, VPP, ZBH1, ZBV, ..."""
    stages: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 4
    """ranks of the pipeline"""
    virtual: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """stages of each rank; by default as the schedule has"""
    microbatches: int = 8
    """microbatches of a step"""
    json: Flag = False
    """the picture's boxes and messages as JSON, or the schedule's actions; with -o beside the file"""


def main(argv: Sequence[str]) -> int:
    """Draws what is asked for and returns the exit status."""
    ours, words = divided(argv)
    asked = parsed(Asked, ours, "draw")
    return answered("draw", lambda: _run(asked, words))


def _run(asked: Asked, words: list[str]) -> int:
    if (asked.script is None) == (asked.schedule is None):
        raise PlanError("name a script, or --schedule with one of " + ", ".join(MODES))
    if asked.schedule is not None:
        return _schedule(asked, asked.schedule)
    return _program(asked, words)


def _program(asked: Asked, words: list[str]) -> int:
    assert asked.script is not None
    check_script(asked.script)
    check_rank(asked.world, asked.rank)
    _check_ending(asked.output, (".svg", ".txt"))
    with waiting(f"running {asked.script} up to its second step"):
        found, _ = rehearse(asked.script, words, asked.world, asked.rank, MACHINE)
        text = draw(found.step, asked.output, asked.depth)
        data = as_data(found.step, asked.depth) if asked.json else None
    if data is not None:
        print_json({"step": found.step.name, "rank": asked.rank, "world": asked.world, "phases": data})
    elif asked.output is None:
        print(text)
    return 0


def _schedule(asked: Asked, name: str) -> int:
    _check_ending(asked.output, tuple(_WRITERS))
    for flag, value in (("stages", asked.stages), ("microbatches", asked.microbatches), ("virtual", asked.virtual)):
        if value is not None and not 0 < value < 10_000:
            raise PlanError(f"--{flag} {value}: want a number from 1")
    schedule = schedule_of(name, asked.stages, asked.virtual)(asked.microbatches)
    if asked.output is not None:
        _WRITERS[asked.output.suffix](asked.output, schedule)
    if asked.json:
        print_json(_timed(schedule))
    elif asked.output is None:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(draw_text(schedule))
    return 0


def _timed(schedule: Schedule) -> dict[str, Any]:
    """What each rank does, and when, in forwards of one microbatch."""
    timeline = simulate(schedule)
    ranks: dict[int, list[dict[str, Any]]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start)):
        ranks.setdefault(span.rank, []).append({"action": str(span.action), "start": span.start, "end": span.end})
    return {"schedule": schedule.name, "bubble_rate": timeline.bubble_rate, "ranks": [*ranks.values()]}


def _text(path: Path, schedule: Schedule) -> None:
    path.write_text(f"{draw_text(schedule)}\n", encoding="utf-8")


_WRITERS: dict[str, Callable[[Path, Schedule], None]] = {
    ".txt": _text, ".svg": draw_figure, ".png": draw_figure, ".pdf": draw_figure, ".json": draw_trace,
}  # fmt: skip


def _check_ending(path: Path | None, endings: tuple[str, ...]) -> None:
    """Before anything runs that takes long."""
    if path is not None and path.suffix not in endings:
        raise PlanError(f"--output {path}: the ending says the format; want one of {', '.join(endings)}")
    check_output("output", path)
