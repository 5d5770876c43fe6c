"""The folder of a job's logs: no other job's are overwritten, neither a running one's nor an earlier one's."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

EARLIER = "earlier"


@contextmanager
def job_folder(folder: Path, shared: bool = False) -> Iterator[Path]:
    """The folder, made if need be, or, while a running job has it, the first of ``folder/2``, ``folder/3``, ... that is free.

    It is this job's until the block ends. ``shared``: with the launchers of the same job on other machines. Raises OSError.
    """
    place, number = folder, 1
    while (lock := _lock(place, shared)) is None:
        number += 1
        place = folder / str(number)
    try:
        yield place
    finally:
        os.close(lock)


def _lock(folder: Path, shared: bool) -> int | None:
    """A descriptor that keeps the folder for this job, as long as it is open; None if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks: as if nobody else were there
        pass
    return descriptor


def set_aside(logs: Iterable[Path]) -> None:
    """Moves an earlier job's logs to a folder named by the time at which it wrote last. Raises OSError."""
    found = [log for log in logs if log.exists()]
    if not found:
        return
    last = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(max(log.stat().st_mtime for log in found)))
    place, number = found[0].parent / EARLIER / last, 1
    while place.exists() and any((place / log.name).exists() for log in found):
        number += 1
        place = place.with_name(f"{last}_{number}")
    place.mkdir(parents=True, exist_ok=True)
    for log in found:
        log.rename(place / log.name)
