"""Which ranks have ended: each leaves its host and process in the rendezvous' store when the ranks meet, to be asked for when
a message fails. Shared memory knows by itself; Gloo and NCCL say that a connection has closed, and not whose."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist

from onecard.comm.base import attempt
from onecard.comm.world import hosts, world

_KEY = "process"
PATIENCE = 1.0  # seconds: a connection closes before its process has ended


def present() -> None:
    """Say who this rank is."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        attempt.store().set(f"{_KEY}/{world.get_rank()}", f"{hosts.name()} {os.getpid()}")


world.waiting.here.append(present)


def words(ranks: Iterable[int]) -> str:
    """Who of some ranks has ended, on this host, as a sentence with a space before it; "" if nobody is known to have."""
    here = _processes(ranks)
    end = time.monotonic() + PATIENCE
    while not (gone := [rank for rank, pid in here.items() if _ended(pid)]) and here and time.monotonic() < end:
        time.sleep(0.05)
    said = ", ".join(f"rank {rank} (process {here[rank]})" for rank in gone)
    return f" Gone: {said}; its own output, or the kernel's, says why." if gone else ""


def ended(ranks: Iterable[int]) -> list[int]:
    """Which of some ranks have ended by now, on this host."""
    return [rank for rank, pid in _processes(ranks).items() if _ended(pid)]


def _processes(ranks: Iterable[int]) -> dict[int, int]:
    me, here = world.get_rank(), dict[int, int]()
    with suppress(RuntimeError, ValueError, dist.DistError):  # a store that rank 0 kept may be gone with it
        store = attempt.store()
        for rank in sorted(set(ranks) - {me}):
            if store.check([f"{_KEY}/{rank}"]):
                host, pid = store.get(f"{_KEY}/{rank}").decode().rsplit(" ", 1)
                here |= {rank: int(pid)} if host == hosts.name() else {}
    return here


def _ended(pid: int) -> bool:
    """Whether a process of this host has ended; one that nobody has asked for yet has, too."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:  # not ours, or a system without /proc
        return False
