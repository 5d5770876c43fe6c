"""The plan of a program for one card: it is run without data up to its second step, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

from onecard.auto.apply import PLAIN, pure
from onecard.auto.calls import over
from onecard.auto.files import Overlay
from onecard.auto.rank import Job
from onecard.errors import OnecardError, PlanError
from onecard.launch._explain import say
from onecard.launch._options import Target
from onecard.launch.rehearsal.program import Program
from onecard.launch.rehearsal.rehearse import RehearsalError, rehearse, said
from onecard.machine.cost import Machine
from onecard.planning.machine_file import machine_named, this_machine
from onecard.planning.search.api import plan


def find(target: Target, ranks: int, machine: str, memory: float) -> Job:
    """The best plan of a program on so many ranks; data parallelism where it cannot be rehearsed.

    Raises:
        PlanError: nothing fits.
    """
    if target.is_module:
        say("a module (-m) is not rehearsed: data parallelism; --auto plan.json takes another plan")
        return Job(pure(ranks))
    with TemporaryDirectory(prefix="onecard-plan-") as folder:
        into = Path(folder) / "job.json"
        words = [target.name, str(ranks), machine, str(memory), str(into), *target.arguments]
        done = subprocess.run(
            [sys.executable, "-m", __name__, *words], check=False, env={**os.environ, "PYTHONHASHSEED": "0"}
        )
        if done.returncode or not into.exists():
            raise PlanError(f"{target.name}: no plan was found; --auto plan.json takes one")
        return Job.from_json(into.read_text(encoding="utf-8"))


def main(argv: list[str]) -> int:
    """The process that looks: writes the plan to a file, prints it."""
    script, ranks, machine, memory, into, *arguments = argv
    try:
        job, text = looked(Path(script), arguments, int(ranks), machine, float(memory))
    except OnecardError as error:
        say(str(error))
        return 2
    print(text, file=sys.stderr)
    Path(into).write_text(job.to_json(), encoding="utf-8")
    return 0


def looked(script: Path, arguments: list[str], ranks: int, machine: str, memory: float) -> tuple[Job, str]:
    """The plan, and why it was chosen."""
    on = machine_named(machine, Machine.measure) if machine else this_machine()
    program = Program()
    try:
        with open(os.devnull, "w") as nothing, redirect_stderr(nothing), files(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program says it again when it runs
            rehearse(script, arguments, 1, 0, on, program)
            model, batch, loss = program.parts()
            names = {name: list(p.shape) for name, p in model.named_parameters()}
            limit = int(memory * 2**30) if memory else None
            found = plan(model, world=ranks, machine=on, batch=tuple(batch), loss=loss, memory=limit, fixed=PLAIN)
    except RehearsalError as why:
        return Job(pure(ranks)), _by_default(str(why), ranks)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as why:
        if isinstance(why, PlanError) and "nothing fits" in str(why):
            raise
        return Job(pure(ranks)), _by_default(f"{script}: {said(why)}", ranks)
    return Job(found.best, names), f"onecard run --auto: {found}"


def _by_default(why: str, ranks: int) -> str:
    told = f"so no price is known: data parallelism over {ranks} ranks; --auto plan.json takes another plan"
    return f"onecard run --auto: {why}\n  {told}"


@contextmanager
def files() -> Iterator[None]:
    """What is written in a rehearsal is written nowhere."""
    with TemporaryDirectory(prefix="onecard-files-") as folder, ExitStack() as stack:
        over(Overlay(folder), stack)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
