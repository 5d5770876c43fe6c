"""The same case on real ranks: a process for each, for programs that cannot share one, and for recordings."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from onecard.comm.base import own
from onecard.comm.world import world
from onecard.proof.real import RealWatch
from onecard.proof.running import Case, failed, play, room, watch_of
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
        return _run.run_ranks(
            _one_of_them, case.world, program, replace(case, program=_nobody), in_float64, keep, timeout=PATIENCE
        )
    except (RankError, RankTimeout, ValueError, TypeError) as fault:
        raise failed(fault, f"{case.world} processes") from fault


def _one_of_them(program: Any, case: Case, in_float64: bool, keep: bool) -> Watched:
    warnings.simplefilter("default")  # the program's own are no errors
    found = program if isinstance(program, Script) else _job.find(program)
    watch = watch_of(case, keep, RealWatch)
    assert isinstance(watch, RealWatch)
    own.around.here = watch.by_python
    around = found.around(world.get_rank()) if isinstance(found, Script) else nullcontext()
    with room(case, in_float64), instead(found), around:
        play(case, found, watch, True, in_float64)
    return watch.seen


def _nobody() -> None:
    """Stands for a program that is found by its name."""
