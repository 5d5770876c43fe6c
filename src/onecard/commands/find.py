"""The plan of a program for one card: it is run without data up to its second step, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from onecard.auto.apply import pure
from onecard.auto.rank import Job
from onecard.errors import OnecardError, PlanError
from onecard.launch._explain import say
from onecard.launch._options import Target
from onecard.launch.rehearsal.program import Program
from onecard.launch.rehearsal.rehearse import RehearsalError, rehearse
from onecard.machine.cost import Machine
from onecard.plan.machine_file import machine_named


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
    on = machine_named(machine, Machine.measure) if machine else _here()
    program = Program()
    try:
        rehearse(script, arguments, 1, 0, on, program)
        model, _batch, _loss = program.parts()
    except (RehearsalError, PlanError) as why:
        return Job(
            pure(ranks)
        ), f"onecard run --auto: {why}\nso it runs under data parallelism; --auto plan.json takes another plan"
    names = {name: list(p.shape) for name, p in model.named_parameters()}
    plan = pure(ranks)
    return Job(plan, names), str(plan)


def _here() -> Machine:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        for known in ("H200", "H100", "A100"):
            if known in name:
                return Machine.preset(known)
    return Machine.measure()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
