"""The folder that a job saves to is the job's until it ends: two jobs that save to one folder would mix their steps.

The claim is a lock of the system on the folder itself (``flock``). It leaves nothing behind, and ends with the process that has
it: rank 0 of the job, from its first save on. A process that no launcher started and that has no group (a notebook, a tool) has
it while it saves.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import CheckpointError

_held: Kept[dict[Path, int]] = Kept(dict)


def take(root: Path) -> int:
    """Claim a folder: the descriptor that holds it, to be closed after the save, or -1 if the job keeps it.

    Raises:
        CheckpointError: another process has it, or another save of this one.
    """
    root = root.resolve()
    job = world.is_job()
    if job and root in _held.here and _same(_held.here[root], root):
        return -1
    give_up(root)
    descriptor = _lock(root)
    if not job:
        return descriptor
    _held.here[root] = descriptor
    return -1


def _lock(root: Path) -> int:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = _holder(descriptor)
        os.close(descriptor)
        raise CheckpointError(
            f"{root}: another job saves there{who}, and has not ended. Give each job a folder of its own, or end that one first"
        ) from None
    except OSError:  # a file system without locks: as if nobody else were there
        pass
    return descriptor


def give_up(root: Path) -> None:
    """Keep no claim on a folder: of a rank that was the first of an earlier group, and is not of this one."""
    descriptor = _held.here.pop(root.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _same(descriptor: int, root: Path) -> bool:
    """Whether the folder is the one that was claimed, not one made anew under its name."""
    return os.path.samestat(os.fstat(descriptor), root.stat())


def _holder(descriptor: int) -> str:
    """Which process of this host has the lock, as far as the system says."""
    try:
        about = os.fstat(descriptor)
        key = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        with open("/proc/locks") as file:
            found = [line.split() for line in file]
        pids = [line[4] for line in found if line[1] == "FLOCK" and line[5] == key and int(line[4]) > 0]
    except (OSError, ValueError, IndexError):
        return ""
    return f" (process {pids[0]} of this host)" if pids else ""


__all__ = ["give_up", "take"]
