"""`onecard run --explain`: what rank 0 of a job sends in its second step, told while it runs."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from onecard.comm.base import record
from onecard.comm.world import world
from onecard.reports.messages import Report


class StepTeller:
    """Listens from a program's beginning to the end of its second step, prints that step, and is gone.

    A step is what lies between two steps of the optimizer that steps first. The second one is told, as the first sends what later
    ones do not: copies of parameters, comparisons. A program that ends earlier is told as far as it came.
    """

    def __init__(self) -> None:
        self._report, self._first = Report(), 0
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        record.observers.here.append(self._heard)
        atexit.register(self.end)

    def _heard(self, message: record.Notice) -> None:
        self._report.steps[-1].append(message)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._first = self._first or id(optimizer)
        if id(optimizer) != self._first:
            return
        if len(self._report.steps) == 2:
            self.end()
        else:
            self._report.next_step()

    def end(self) -> None:
        """Print, once."""
        if self._hook is None:
            return
        self._hook.remove()
        record.observers.here.remove(self._heard)
        atexit.unregister(self.end)
        self._hook = None
        steps = self._report.steps
        shown = Report([steps[-1]])
        what = "its second step" if len(steps) == 2 else "all that ran, which was not two steps"
        head = f"onecard run --explain: rank 0 of {world.get_world_size()}, {what}"
        print(
            f"{head}: no message of onecard's" if not shown.messages else f"{head}\n{shown}",
            file=sys.stderr,
            flush=True,
        )


def begin() -> None:
    """Called in rank 0, ahead of the program."""
    StepTeller()
