"""``python -m onecard.rules.verify``: prove the rows of the table by brute force."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from onecard.rules.call import schema_of
from onecard.rules.registry import row_name
from onecard.rules.samples import samples
from onecard.rules.table import families
from onecard.rules.verify.guard import Note, guarded
from onecard.rules.verify.report import calls_of_samples, show, verify_calls, write_markdown

_MESHES = {"2": (2,), "3": (3,), "2x2": (2, 2)}


@dataclass
class VerifyOptions:
    """Prove the sharding rules by brute force, in this one process; exit status 1 if any is wrong."""

    op: str = ""
    """Only this operator, e.g. addmm."""
    mesh: Annotated[tuple[Literal["2", "3", "2x2"], ...], tyro.conf.arg(metavar="{2,3,2x2} ...")] = ("2",)
    """The meshes to prove on."""
    family: str = ""
    """Only the operators of this family, e.g. reduction."""
    markdown: Path | None = None
    """Write the list of operators and rules to this file."""
    missed: bool = False
    """Also look for operand layouts that a row forbids though they would be right, and list them."""


def main(options: VerifyOptions) -> int:
    """Runs the proof and prints it; returns the exit status."""
    status, fault = guarded(lambda note: prove_and_show(options, note))
    if fault:
        Console().print(f"[red]a kernel ended the process:[/] {fault}. Does a hook or nonempty= forget empty shards?")
    return status


def prove_and_show(options: VerifyOptions, note: Note) -> int:
    """``main`` in this process."""
    console = Console()
    known = {*families, *(sample.family for sample in samples())}
    if options.family and options.family not in known:
        console.print(f"there is no family {options.family!r}; families: {', '.join(sorted(known))}", style="red")
        return 2
    made, broken = calls_of_samples()
    for line in broken:
        console.print(f"[red]broken sample[/] {escape(line)}", highlight=False)
    calls = [call for call in made if _wanted(call.func, options)]
    if not calls:
        console.print(f"no sample calls {options.op or options.family!r}", style="red")
        return 2
    report = verify_calls(
        calls,
        [_MESHES[name] for name in options.mesh],
        options.missed,
        watch=lambda call: note(f"{call.name} of {call.where}"),
    )
    partial = bool(options.op or options.family)
    if partial:
        report.uncovered = [n for n in report.uncovered if n in families.get(options.family, ()) or n == options.op]
    show(report, console, options.missed, each=1000 if options.op else 3)
    if options.markdown is not None:
        write_markdown(report, options.markdown, ", ".join(options.mesh))
    return 1 if report.wrong or broken else 0


def _wanted(func: Any, options: VerifyOptions) -> bool:
    row = row_name(func)
    if options.op and options.op not in (schema_of(func).name, schema_of(func).functional, row):
        return False
    return not options.family or row in families.get(options.family, ())


if __name__ == "__main__":
    sys.exit(main(tyro.cli(VerifyOptions)))
