"""``make fuzz``: random training programs on real ranks, compared with plain torch on one card."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fuzz.crew import run_many
from fuzz.cut_down import cut_down, runnable
from fuzz.draw import draw
from fuzz.plants import PLANTS
from fuzz.program import MESHES, Program, size_of
from fuzz.twin import Outcome

BLOCK = 200  # programs drawn at a time; those of as many ranks among them run together


@dataclass(frozen=True)
class Options:
    """Random training programs on a mesh against plain torch; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 2000
    """how many programs, of the seeds from there on"""
    ranks: int = 0
    """only meshes of so many ranks: 2, 3 or 4"""
    plant: str = ""
    """a deliberate fault in the engine, by its name in plants.py: is it found?"""
    cut: bool = True
    """cut failing programs down"""
    failures: int = 5
    """stop after so many"""


def main(options: Options) -> int:
    """Runs the programs and prints what failed; returns the exit status."""
    if options.plant and options.plant not in PLANTS:
        print(f"there is no plant {options.plant!r}; there are {sorted(PLANTS)}")
        return 2
    console = Console(highlight=False, soft_wrap=True)
    begin, right, failed = time.monotonic(), 0, 0
    refused: dict[str, list[int]] = {}
    for program, outcome in _search(options, console):
        if outcome.kind == "wrong":
            failed += 1
            _show(console, program, outcome, options)
        elif outcome.kind == "refused":
            refused.setdefault(outcome.why, []).append(program.seed)
        else:
            right += 1
        if failed == options.failures:
            break
    for why, seeds in refused.items():
        console.print(f"refused as documented: {why}: {len(seeds)}, for example seed {seeds[0]}")
    count = right + failed + sum(map(len, refused.values()))
    console.print(f"{count} programs from seed {options.seed} on: {right} right, {failed} failed", end="")
    console.print(f", {count - right - failed} refused; {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def _search(options: Options, console: Console) -> Iterator[tuple[Program, Outcome]]:
    """Draw and run, block by block, under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        bar, done = progress.add_task("fuzz", total=options.count), 0
        for start in range(options.seed, options.seed + options.count, BLOCK):
            block = []
            for seed in range(start, min(start + BLOCK, options.seed + options.count)):
                progress.update(bar, description=f"draw {seed}")
                block.append(draw(seed, _mesh(seed, options.ranks)))
            progress.update(bar, description=f"run from {start}")
            for found in run_many(block, lambda n: progress.update(bar, completed=done + n), options.plant):  # noqa: B023
                done += 1
                progress.update(bar, completed=done)
                yield found


def _mesh(seed: int, ranks: int) -> tuple[object, ...]:
    """The mesh of a seed, among those of so many ranks."""
    fit = [mesh for mesh in MESHES if ranks in (0, size_of(mesh))]
    if not fit:
        raise SystemExit(f"no mesh has {ranks} ranks; there are {sorted({size_of(mesh) for mesh in MESHES})}")
    return fit[seed % len(fit)]


def _show(console: Console, program: Program, outcome: Outcome, options: Options) -> None:
    more = f" --ranks {options.ranks}" if options.ranks else ""
    more += f' --plant "{options.plant}"' if options.plant else ""
    again = f"make fuzz ARGS='--seed {program.seed} --count 1{more}'"
    console.rule(f"seed {program.seed} failed")
    console.print(outcome.why, markup=False)
    if options.cut:
        program, outcome = cut_down(program, outcome, plant=options.plant)
        console.print(f"\ncut down to {len(program.lines)} statements:\n", markup=False)
    console.print(runnable(program, outcome), markup=False)
    console.print(f"\nagain: {again}\n", markup=False)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
