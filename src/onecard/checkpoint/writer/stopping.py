"""Preemption: a SIGTERM is noted, and all ranks hear of it at the same place of the program, where they can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives, groups
from onecard.comm.world import world
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh

_noted: list[int] = []  # of the process: a signal may come while it pretends to be another rank
_state: dict[str, Any] = {}


def preempted() -> bool:
    """Whether the job was asked to end (SIGTERM to the launcher, or to a rank): the same on all ranks, which all call it.

    From its first call on, SIGTERM does not end the process; the program ends itself when this says so. Once a step is
    usual: on several ranks it costs one all-reduce of 8 bytes.

    Example:
        >>> preempted()
        False
    """
    _listen()
    if world.get_world_size() == 1:
        _state["heard"] = bool(_noted)
        return bool(_noted)
    mesh = ProcessMesh(range(world.get_world_size()), ["world"])
    mine = torch.tensor([len(_noted)], device="cpu")
    if record.observers.here:
        layout = Layout.replicated(mesh, 1)
        step = Step("all_reduce", 0, layout, layout, bytes=mine.nbytes, seconds=machine.here.message(mine.nbytes))
        line = record.user_line()
        record.tell(record.Notice(step, "preempted", "signal", (1,), "any rank's counts", line, explicit=True))
    record.serving.here = ("preempted", "signal", (1,))
    found = bool(collectives.all_reduce(mine, groups.group(mesh, 0), "max").item())
    _state["heard"] = found
    return found


@contextmanager
def preemption_noted() -> Iterator[None]:
    """Within, a SIGTERM is noted. Behind it the process ends by one, as before; also by one that nobody has heard of yet."""
    began = _listen()
    known = len(_noted)
    _state["heard"] = False
    try:
        yield
    finally:
        if began:
            signal.signal(signal.SIGTERM, _state.pop("before") or signal.SIG_DFL)
            if len(_noted) > known and not _state["heard"]:
                del _noted[known:]  # it is the program's
                signal.raise_signal(signal.SIGTERM)


def _listen() -> bool:
    """Whether SIGTERM is noted from now on, and was not before."""
    if "before" in _state or threading.current_thread() is not threading.main_thread():
        return False
    _state["before"] = signal.signal(signal.SIGTERM, _note)
    return True


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
