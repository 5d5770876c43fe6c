"""Cut a failing program down: drop statements while it still fails (delta debugging), then print what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fuzz.crew import run_many
from fuzz.program import Program, axes_of, size_of
from fuzz.twin import Outcome, one_card

Found = tuple[Program, Outcome]
ROUNDS = 12


def cut_down(
    program: Program, outcome: Outcome, told: Callable[[str], None] = lambda text: None, plant: str = ""
) -> Found:
    """The smallest failing program that was found, and how it fails."""
    found = (replace(program, look=True), outcome)
    found = _first_failing([found[0]], plant) or (program, outcome)
    for _ in range(ROUNDS):
        told(f"{len(found[0].lines)} statements")
        smaller = _first_failing(_candidates(*found), plant)
        if smaller is None:
            break
        found = smaller
    return found


def _candidates(program: Program, outcome: Outcome) -> Iterator[Program]:
    """Smaller programs that run on one card, those that leave out most first."""
    if program.steps > 1:
        yield replace(program, steps=1)
        yield replace(program, steps=outcome.step + 1)
    count = len(program.lines)
    if 0 <= outcome.at < count - 1:
        yield program.without(range(outcome.at + 1, count))
    size = count // 2
    while size:
        yield from (program.without(range(at, min(at + size, count))) for at in range(0, count, size))
        size //= 2


def _first_failing(programs: Sequence[Program] | Iterator[Program], plant: str) -> Found | None:
    """The first of some programs that fails; those that do not run on one card are passed over."""
    fit = [p for p in programs if p.lines and one_card(p)[0].kind == "right"]
    return next((found for found in run_many(fit, plant=plant, first=True) if found[1].kind == "wrong"), None)


def runnable(program: Program, outcome: Outcome) -> str:
    """The program as a script that prints what it has made, on its mesh or on one card."""
    wrong = outcome.why.partition("\n")[0]
    marked = [line + (f"  # {wrong}" if i == outcome.at else "") for i, line in enumerate(program.lines)]
    cut, names = len(program.setup), ["x", "y"][: axes_of(program.ranks)]
    body = [f"    {line}" for line in marked[cut:]] or ["    pass"]
    return "\n".join(
        [
            f"# {wrong}",
            f"# PYTHONPATH=tests onecard run --nproc_per_node {size_of(program.ranks)} this.py; on one card: this.py --plain",
            "import sys",
            "import torch",
            "import onecard",
            "from fuzz.program import helpers",
            "from fuzz.twin import everything",
            "",
            "torch.set_default_dtype(torch.float64)",
            f"mesh = None if '--plain' in sys.argv else onecard.ProcessMesh({program.ranks!r}, {names})",
            "globals().update(helpers(mesh))",
            f"torch.manual_seed({program.seed})",
            "",
            *marked[:cut],
            f"for step in range({program.steps}):",
            *body,
            "for name, value in everything(dict(globals())).items():",
            "    print(name, value)",
        ]
    )
