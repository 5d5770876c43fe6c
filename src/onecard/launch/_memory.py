"""Whether the kernel has killed processes for want of memory: it says so in counters only, never to the one that is killed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """How many processes were killed for memory since this object was made, among ours or on the whole machine."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self._files = _counters() if files is None else files
        self._before = [_read(file) for file in self._files]

    def seen(self) -> bool:
        """Whether any was."""
        return any(_read(file) > before for file, before in zip(self._files, self._before, strict=True))


def _counters() -> list[Path]:
    """The files that count: those of this process's control group (versions 2 and 1), and the machine's."""
    found = [Path("/proc/vmstat"), _GROUPS / "memory.events", _GROUPS / "memory/memory.oom_control"]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            if not kinds:
                found.append(_GROUPS / group.strip("/") / "memory.events")
            elif "memory" in kinds.split(","):
                found.append(_GROUPS / "memory" / group.strip("/") / "memory.oom_control")
    return list(dict.fromkeys(found))


def _read(file: Path) -> int:
    """The count in a file; 0 where there is none."""
    try:
        count = _COUNT.search(file.read_text())
    except OSError:
        return 0
    return int(count[1]) if count else 0
