"""The same case on real ranks: a process for each, for programs that cannot share one, and for recordings."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from onecard.comm.base import own
from onecard.comm.joined.worlds import begin_unseeded, grouped, unseeded
from onecard.comm.world import world
from onecard.proof.disk import disks, on
from onecard.proof.real import RealWatch
from onecard.proof.running import ROOM, Case, failed, play, room, watch_of
from onecard.proof.script import Script, instead
from onecard.proof.seen import Watched
from onecard.testing import _job, _run
from onecard.testing._report import RankError, RankTimeout

PATIENCE = 600.0
"""Seconds for all ranks."""


def on_processes(case: Case, in_float64: bool, keep: bool) -> list[Watched]:
    """What each rank computes, as processes of this host with a real process group.

    Raises:
        ProofError: one of them fails, or the program cannot be found by another process.
    """
    try:
        program = case.program if isinstance(case.program, Script) else _job.locate(case.program)
        with tempfile.TemporaryDirectory(prefix=ROOM) as folder:
            return _run.run_ranks(
                _one_of_them, case.world, program, replace(case, program=_nobody), in_float64, keep, folder, unseeded(0),
                timeout=PATIENCE,
            )  # fmt: skip
    except (RankError, RankTimeout, ValueError, TypeError) as fault:
        raise failed(fault, f"{case.world} processes") from fault


def _one_of_them(
    program: Any, case: Case, in_float64: bool, keep: bool, folder: str, numbers: tuple[Any, Any]
) -> Watched:
    warnings.simplefilter("default")  # the program's own are no errors
    found = program if isinstance(program, Script) else _job.find(program)
    watch = watch_of(case, keep, RealWatch)
    assert isinstance(watch, RealWatch)
    own.around.here = watch.by_python
    number = world.get_rank()
    around = found.around(number) if isinstance(found, Script) else nullcontext()
    begin_unseeded(unseeded(number) if number else numbers)
    disk = disks(folder, case.world, case.plan is not None)[number]
    with room(case, in_float64), instead(found), grouped(), on(disk), around:
        play(case, found, watch, True, in_float64)
    return watch.seen


def _nobody() -> None:
    """Stands for a program that is found by its name."""
