"""The plan of a program for one card: it is run without data up to its second step, in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from onecard.auto.apply import found_plain, pure
from onecard.auto.calls import over
from onecard.auto.files import Overlay
from onecard.auto.rank import Job
from onecard.commands.here import measured_for
from onecard.errors import NothingFits, OnecardError, PlanError
from onecard.launch._explain import say
from onecard.launch._options import Target
from onecard.launch.rehearsal.rehearse import RehearsalError, place, rehearse, said
from onecard.launch.rehearsal.replicated import Replicated
from onecard.machine.cost import Machine
from onecard.planning.machine_file import machine_named, this_machine
from onecard.planning.program import HeardProgram
from onecard.planning.search.api import plan
from onecard.planning.search.plans import Plans
from onecard.rules.verify.guard import forked

LONG = 5.0
"""Seconds after which it is said that a plan is looked for: a step of many operators takes a minute."""


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
        child = _started([target.name, str(ranks), machine, str(memory), str(into), *target.arguments])
        looks = threading.Timer(LONG, say, (f"looking for the best way to divide {target.name}, without running it",))
        looks.daemon = True
        looks.start()
        try:
            _, status = os.waitpid(child, 0)
        finally:
            looks.cancel()
        if status or not into.exists():
            raise PlanError(
                f"{target.name}: no plan was found{_ended(os.waitstatus_to_exitcode(status))}; --auto plan.json takes one"
            )
        return Job.from_json(into.read_text(encoding="utf-8"))


def _ended(status: int) -> str:
    """How the process that looks came to its end, where it has not said so itself."""
    if status >= 0:
        return ""
    said = " (as a system does that runs out of memory)" if status == -signal.SIGKILL else ""
    return f": the process that looked for it was ended by {signal.Signals(-status).name}{said}"


def _started(words: list[str]) -> int:
    """The process that looks: a copy of this one, which has imported all that a new one would import again (4 s of a processor).

    It ends without what a program has put down for its end: nothing of a rehearsal is to last.
    """

    def work() -> int:
        os.environ["PYTHONHASHSEED"] = "0"  # as ranks have it
        return main(words)

    return forked(work)


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
    """The plan, and why it was chosen; data parallelism where the program cannot be rehearsed."""
    on = machine_named(machine, measured_for(ranks)) if machine else this_machine()
    try:
        with open(os.devnull, "w") as nothing, redirect_stderr(nothing):
            found, names = searched(script, arguments, ranks, on, memory)
    except RehearsalError as why:
        if memory:
            raise RehearsalError(
                f"{why}\n  so no price is known, nor what fits in --memory {memory:g}: --auto plan.json takes a plan as it is"
            ) from why
        return Job(pure(ranks)), _by_default(str(why), ranks)
    return Job(found.best, names), f"onecard run --auto: {found}"


def searched(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    machine: Machine,
    memory: float,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    objective: str = "time",
) -> tuple[Plans, dict[str, list[int]]]:
    """The plans of a program for one card, and the shapes of its parameters by name.

    Args:
        memory: GiB of a rank; 0: what the machine has. fixed, objective: as for ``oc.plan``.

    Raises:
        RehearsalError: it cannot be run without devices, or not be divided; the cause is what stopped it.
        NothingFits: no plan does.
    """
    program = HeardProgram((Replicated,))
    with files(), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program says it again when it runs
        rehearse(script, arguments, 1, 0, machine, program)
        limit = int(memory * 2**30) if memory else None

        def of(parts: tuple[Any, ...]) -> tuple[Plans, dict[str, list[int]]]:
            model, batch, loss = parts
            names = {name: list(p.shape) for name, p in model.named_parameters()}

            def with_fields(all_fixed: dict[str, Any]) -> Plans:
                return plan(
                    model, world=ranks, machine=machine, batch=tuple(batch), loss=loss, memory=limit, fixed=all_fixed,
                    objective=objective,
                )  # fmt: skip

            return replace(found_plain(with_fields, fixed), told=program.told()), names

        try:
            return of(program.parts())
        except NothingFits:
            raise
        except _NOT_PRICED as why:
            try:
                found, names = of(program.parts_of_model())
            except NothingFits:
                raise
            except _NOT_PRICED:
                raise RehearsalError(f"{place(why, script)}: {said(why)}") from why
            return replace(
                found,
                told=f"not in these prices is what {script} makes of the model's results: {place(why, script)}: {said(why)}",
            ), names


_NOT_PRICED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What a recording of somebody's code may raise."""


def _by_default(why: str, ranks: int) -> str:
    told = f"so no price is known: data parallelism over {ranks} ranks; --auto plan.json takes another plan"
    return f"onecard run --auto: {why}\n  {told}"


@contextmanager
def files() -> Iterator[None]:
    """What is written in a rehearsal is written nowhere."""
    with TemporaryDirectory(prefix="onecard-files-") as folder, ExitStack() as stack:
        over(Overlay(folder), stack)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """No logger speaks: torch logs the traces of faults that are told here in a sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
