"""Who a process is, whether it still lives, and whether it shares a kernel with us."""

from __future__ import annotations

import os
from pathlib import Path


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is no such process, or only its corpse.

    With the pid it names a process for good: pids are used again, pids with start times are not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may hold anything, ')' included
    return 0 if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, start: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return start_time(pid) == start


def kernel() -> str:
    """What must be equal for two processes to see each other's memory and pids: boot, pid and user namespaces.

    Host names do not tell: containers share them, and cloned machines keep them.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError as error:
            parts.append(f"{path}: {error.strerror}")
    return " ".join(parts)
