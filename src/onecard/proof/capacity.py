"""Memory for the values that a proof keeps: what does not fit is told before the system ends the process without a word."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from onecard.errors import ProofError

LOOK = 2**26  # bytes kept between two looks
LEFT = 2**29  # bytes that are left to the rest of the machine
_kept = [0]  # since the last look, by all ranks of this process


def copied(x: Tensor) -> Tensor:
    """A copy of a tensor's values, if there is room for it.

    Raises:
        ProofError: this machine has no memory left for it.
    """
    _kept[0] += x.nbytes
    if _kept[0] >= LOOK:
        _kept[0] = 0
        free = available()
        if free is not None and free < x.nbytes + LEFT:
            raise ProofError(
                f"a proof keeps all values of one card and of each rank, and {free / 2**30:.1f} GiB of memory are left. "
                "Make widths smaller: onecard prove ... --narrow NAME=SIZE, or the script's own flags after --; or take "
                "fewer ranks or steps"
            )
    return x.detach().clone()


def available() -> int | None:
    """Bytes that can still be taken here: of the machine, and of the group that this process is in; None: nobody says."""
    found = [_field("/proc/meminfo", "MemAvailable:", 1024)]
    most, now = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if most is not None and now is not None:
        found.append(most - now + (_field("/sys/fs/cgroup/memory.stat", "inactive_file", 1) or 0))
    return min((n for n in found if n is not None), default=None)


def _field(path: str, name: str, unit: int) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(name)), None)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
