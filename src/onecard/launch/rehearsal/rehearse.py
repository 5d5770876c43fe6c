"""Run a program up to its second optimizer step, or its second step by hand; say in a line what stops it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from onecard.comm.base.record import _NOT_USERS
from onecard.comm.world.pretend import pretend
from onecard.errors import OnecardError
from onecard.launch.rehearsal.region import Rehearsed, RehearsedSteps, SecondStepEnded
from onecard.launch.rehearsal.stage import stage
from onecard.launch.rehearsal.values import RehearsedCalls, RehearsedValues
from onecard.machine.cost import Machine
from onecard.planning.program import HeardProgram
from onecard.static.price.price import Cost, cost


class RehearsalError(OnecardError, RuntimeError):
    """A program that cannot be run up to its second step without devices; says which line stopped it."""


def rehearse(
    script: Path, arguments: Sequence[str], world: int, rank: int, machine: Machine, program: HeardProgram | None = None
) -> tuple[Rehearsed, Cost]:
    """The second step of a program, as one rank of a world runs it.

    Args:
        script, arguments: what runs, as ``__main__``.
        program: listens to it, as one for one card, which nobody's launcher has started.

    Raises:
        RehearsalError: the line that stopped it.
    """
    region = RehearsedSteps()
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", [str(script), *arguments]))
        stack.enter_context(patch.object(sys, "path", [str(script.resolve().parent), *sys.path]))
        stack.enter_context(pretend(world, rank, machine, fake=True))
        stack.enter_context(stage(world, rank, machine.per_host, launched=program is None))
        values = RehearsedValues()
        calls = RehearsedCalls(values)
        stack.enter_context(values)
        stack.enter_context(calls)
        stack.enter_context(region)
        calls.listeners.append(region.heard)
        if program is not None:  # behind the region, which begins as a module does
            calls.listeners.append(program.heard)
            stack.enter_context(program)
        try:
            runpy.run_path(str(script), run_name="__main__")
            region.ended()
        except SecondStepEnded:
            pass
        except SystemExit as stop:
            raise RehearsalError(
                f"{place(stop, script)}: the program ended itself{_code(stop)} after {_steps(region)}"
            ) from None
        except KeyboardInterrupt:
            raise
        except BaseException as fault:
            raise RehearsalError(f"{place(fault, script)}: {said(fault)}") from fault
        if region.found is None:
            raise RehearsalError(f"{script}: ended after {_steps(region)}; a step is what lies between two of them")
        try:
            priced = cost(region.found.step, machine)
        except Exception as fault:  # ours, whatever it is: a program runs without a price, too
            raise RehearsalError(f"{script}: its step was written down, and is not priced: {said(fault)}") from fault
    return region.found, priced


def _steps(region: RehearsedSteps) -> str:
    return "no optimizer step" if not region.steps else f"{region.steps} optimizer step{'s' * (region.steps > 1)}"


def _code(stop: SystemExit) -> str:
    if stop.code is None or stop.code == 0:
        return ""
    return f" ({stop.code})" if isinstance(stop.code, str) else f" with status {stop.code}"


def said(fault: BaseException) -> str:
    """The first line of what an error says; torch's names for "values decide" say it in words."""
    text = str(fault).strip().splitlines()
    if type(fault).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException") and text:
        return f"values decide what {text[0].removesuffix('.default')} gives, and there are none in a rehearsal"
    return f"{type(fault).__name__}: {text[0]}" if text else type(fault).__name__


def place(fault: BaseException, script: Path) -> str:
    """``file:line`` of the innermost line on the way to an error that is the program's own."""
    frames = [f for f in traceback.extract_tb(fault.__traceback__) if not f.filename.startswith(_NOT_USERS)]
    frames = [f for f in frames if not f.filename.startswith("<")]
    made_at = getattr(fault, "made_at", "")  # of a call that is made again
    own = [f for f in frames if Path(f.filename).resolve().is_relative_to(script.resolve().parent)] or frames
    file, _, line = f"{own[-1].filename}:{own[-1].lineno}".rpartition(":") if own else made_at.rpartition(":")
    if not file:
        return str(script)
    name = os.path.relpath(file)
    return f"{name if not name.startswith('..') else file}:{line}"
