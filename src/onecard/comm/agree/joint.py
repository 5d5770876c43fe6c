"""Steps that ranks do together: one that fails leaves word, and those that wait in the same step hear of it (``base.failed``)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from onecard._torch.names import fakes
from onecard.comm.base import failed
from onecard.comm.base.state import REAL, Kept, faked, home
from onecard.comm.shm.group import ShmGroup
from onecard.comm.world import world

_steps: Kept[dict[Any, failed.Together]] = Kept(dict)
_LOOK = 1.0  # seconds between two looks of the thread


class joint_step:
    """Around a step that ranks do together, on all of them: what ends it on one is told to those that wait in it.

    Args:
        ranks: who does it. One within another is that one's affair.

    Example:
        >>> with joint_step("step", (0,)):
        ...     pass
    """

    __slots__ = ("_key", "_step")
    _step: failed.Together | None

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self._key, self._step = (name, tuple(ranks)), None

    def __enter__(self) -> None:
        if len(self._key[1]) < 2 or failed.doing.here is not None or not world.has_met() or _apart():
            return
        step = _steps.here.get(self._key)
        if step is None:
            step = _steps.here[self._key] = failed.Together(*self._key, world.get_rank())
            _watch()
        step.begins()
        self._step = failed.doing.here = step

    def __exit__(self, kind: Any, why: BaseException | None, trace: Any) -> None:
        if self._step is not None:
            failed.doing.here = None
            if why is not None and not isinstance(why, failed.StoppedBefore):
                self._step.failed(f"{type(why).__name__}: {why}")


def refused(why: str) -> None:
    """This rank has refused something of the program's between two steps: whoever waits for it in the next one is told."""
    if world.get_world_size() > 1 and dist.is_initialized() and failed.doing.here is None and not _apart():
        failed.between(world.get_rank(), why[: failed.QUOTED])


def _apart() -> bool:
    """Whether no other process does anything here."""
    return home.here is not REAL or fakes() or faked.here or world.alone.here


_thread: Kept[list[threading.Thread]] = Kept(list)


def _watch() -> None:
    """Where waiting is not ours (Gloo, NCCL), and cannot be ended: a thread that says what is known, once for each step."""
    if not _thread.here and not isinstance(dist.group.WORLD, ShmGroup):
        _thread.here.append(threading.Thread(target=_looks, name="onecard failed ranks", daemon=True))
        _thread.here[0].start()


def _looks() -> None:
    told = None
    while True:
        time.sleep(_LOOK)
        step = failed.doing.here
        if step is not None and (step, step.number) != told and (said := step.look()):
            told = step, step.number
            with suppress(OSError, ValueError):
                print(f"onecard: {said}. This wait ends with that rank's process", file=sys.stderr, flush=True)
