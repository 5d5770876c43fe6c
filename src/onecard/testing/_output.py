"""What the ranks print, as the parent shows it: rank 0's lines as they come, the others' when the run is over."""

from __future__ import annotations

import sys
from contextlib import suppress

from onecard.testing._job import RankJob


class RankOutput:
    """The part of one rank's output that has not been shown yet."""

    def __init__(self, job: RankJob) -> None:
        self._path, self._label = job.path("out"), f"[rank {job.rank}]"
        self._shown = 0  # bytes

    def show(self, *, rest: bool = False) -> None:
        """Shows the lines that are complete; with `rest` also one that has no end yet."""
        with suppress(OSError), open(self._path, "rb") as file:  # none: the rank has not come so far
            file.seek(self._shown)
            new = file.read()
            new = new if rest else new[: new.rfind(b"\n") + 1]
            self._shown += len(new)
            sys.stdout.writelines(f"{self._label} {line}\n" for line in new.decode(errors="replace").splitlines())
            if new:
                sys.stdout.flush()  # into a file or a pipe it would wait for the end of the run
