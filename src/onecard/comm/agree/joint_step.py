"""Steps that ranks do together: one that fails leaves word, and those that wait in the same step hear of it (``base.failed``)."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from onecard._torch.names import fakes
from onecard.comm.base import failed
from onecard.comm.base.state import REAL, Kept, faked, home
from onecard.comm.shm.group import ShmGroup
from onecard.comm.world import world

_numbers: Kept[Counter[Any]] = Kept(Counter)
_LOOK = 1.0  # seconds between two looks of the thread


@contextmanager
def joint_step(name: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Around a step that ranks do together, on all of them: what ends it on one is told to those that wait in it.

    Args:
        ranks: who does it; all of the world if left out. One within another is that one's affair.

    Example:
        >>> with joint_step("step"):
        ...     pass
    """
    size = world.get_world_size()
    if size == 1 or not dist.is_initialized() or failed.under_way.here is not None or _apart():
        yield
        return
    whole = tuple(ranks) or tuple(range(size))
    key = name, whole
    _numbers.here[key] += 1
    me = world.get_rank()
    failed.comes(me)
    step = failed.under_way.here = failed.Together(name, whole, me, _numbers.here[key])
    _watch()
    try:
        yield
    except BaseException as why:
        step.failed(f"{type(why).__name__}: {why}"[: failed.QUOTED])
        raise
    finally:
        failed.under_way.here = None


def refused(why: str) -> None:
    """This rank has refused something of the program's between two steps: whoever waits for it in the next one is told."""
    if world.get_world_size() > 1 and dist.is_initialized() and failed.under_way.here is None and not _apart():
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
        step = failed.under_way.here
        if step is not None and step is not told and (said := step.look()):
            told = step
            with suppress(OSError, ValueError):
                print(f"onecard: {said}. This wait ends with that rank's process", file=sys.stderr, flush=True)
