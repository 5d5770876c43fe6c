"""Runner: goes through a rank's list of actions, of any schedule, for the stages that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard.comm import sparse_check, world
from onecard.comm.ranks import Ranks, of_ranks
from onecard.comm.state import REAL, home
from onecard.errors import CommunicationError, ScheduleError
from onecard.pipeline import batches
from onecard.pipeline.action import Action, Schedule
from onecard.pipeline.check import check_schedule
from onecard.pipeline.meter import Meter
from onecard.pipeline.shares import Shares
from onecard.pipeline.stage import Stage
from onecard.pipeline.step import Step
from onecard.pipeline.timing import Timeline

PROVED = 8  # schedules that are known to run: one for each number of microbatches in use


class Runner:
    """Runs the stages of this rank under a schedule: what it sends and receives is under way while it computes.

    Every rank of the group makes one, and calls ``step`` with the same schedule and the whole batch, as on one card. The
    gradients that ``step`` leaves in ``grad`` of the parameters are those of the loss of the whole batch.

    Args:
        stages: this rank's stages by number: modules, or functions of one value. What one returns, the next is given:
            tensors, or tuples, lists and dicts of them, so that also what only a later stage needs can be handed on.
        loss_fn: (what the last stage returns, its part of the targets) -> one number, a sum over the microbatch's rows or a
            mean: over samples, or over what is counted by its targets (labels that are not ignored, masks, weights).
        group: the ranks of the pipeline, in the schedule's order; all if left out.
        around: makes the context of each forward, such as ``torch.autocast``.
        timeout: seconds that a message may take; that of the process group (``ONECARD_TIMEOUT``) if left out.
        device: where what is received lies; this rank's if left out.
        halves: whether I leaves the weights to W. Not where stages recompute their activations: W would do so once more.

    Example:
        >>> from onecard import pipeline
        >>> net = torch.nn.Linear(3, 1)
        >>> runner = Runner({0: net}, lambda y, target: (y - target).square().mean())
        >>> loss = runner.step(pipeline.one_f_one_b(1, 2), torch.ones(5, 3), torch.zeros(5, 1), sizes=[3, 2])
        >>> torch.allclose(loss, net(torch.ones(5, 3)).square().mean())
        True
    """

    def __init__(
        self,
        stages: Mapping[int, Callable[[Any], Any]],
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        group: Ranks | None = None,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        timeout: float | None = None,
        device: torch.device | None = None,
        halves: bool = True,
    ) -> None:
        self.group = of_ranks() if group is None else group
        self.device = world.device() if device is None else device
        self.loss_fn, self.timeout = loss_fn, timeout
        self.meter: Meter | None = None
        """Where one is set, what each stage keeps for its backward is counted."""
        self.spans: list[tuple[int, Action, float, float]] = []
        """When each computation of the last step began and ended, in seconds of this host's clock."""
        self.shares = None if loss_fn is None else Shares(loss_fn)
        self.stages = {number: Stage(run, loss_fn, around, halves) for number, run in stages.items()}
        self._proved: list[Schedule] = []
        self._failed = ""
        self._batches: list[sparse_check.Site] | None = None

    def step(
        self,
        schedule: Schedule,
        inputs: Any,
        targets: Any = None,
        sizes: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        scale: float | Tensor = 1.0,
        share: bool = True,
    ) -> Tensor | None:
        """Forward and backward of a batch; gradients are added to those of the parameters.

        Args:
            schedule: proved before it first runs.
            inputs: of the whole batch, given on every rank: the first stage reads them, all others their shapes.
            targets: of the whole batch, for the loss.
            sizes: of the microbatches; as equal as can be if left out.
            weights: of each microbatch's loss in that of the batch; by what the loss is seen to divide by if left out.
            scale: what the gradients are multiplied with.
            share: whether every rank gets the loss; else the one with the last stage only, and None elsewhere.

        Returns:
            The loss of the batch.

        Raises:
            ScheduleError: a schedule that cannot run, or that these stages do not fit; a batch that does not divide.
            CommunicationError: a message that does not come; names the rank and the action that waited.
        """
        self._fit(schedule)
        with torch.enable_grad():
            run = Step(self, schedule.ranks[self.group.index], schedule, inputs, targets, sizes, weights, scale)
            return run.go(share)

    @torch.no_grad()
    def evaluate(
        self, schedule: Schedule, inputs: Any, targets: Any = None, sizes: Sequence[int] | None = None,
        weights: Sequence[float | Tensor] | None = None, loss: bool = True, share: bool = True,
    ) -> Any:  # fmt: skip
        """The forwards of a schedule alone, without gradients.

        Returns:
            The loss, as of ``step``; or, with ``loss=False``, what the last stage returned, of the whole batch. Without
            ``share`` on the rank with the last stage only, and None elsewhere.
        """
        self._fit(schedule)
        forward = ("F", "SEND_F", "RECV_F")
        row = tuple(action for action in schedule.ranks[self.group.index] if action.kind in forward)
        run = Step(self, row, schedule, inputs, targets, sizes, weights, 1.0, loss)
        return run.go(share) if loss else run.outputs_after(share)

    def _fit(self, schedule: Schedule) -> None:
        """Prove a schedule, once, and that it means these ranks and stages."""
        if self.group.size > 1 and home.here is not REAL:
            raise ScheduleError(
                "a pipeline's stages tell each other what they send, and in a pretended world nothing arrives: "
                "pipeline.check_schedule(schedule, times, sizes) says what a step takes"
            )
        if self.group.size > 1 and self._failed:
            raise CommunicationError(
                "a step of this pipeline ended in the middle, and messages of it may be under way, which the next would take "
                f"for its own: end the program on all ranks and go on from a checkpoint. It was: {self._failed}"
            )
        if any(schedule is known for known in self._proved):
            return
        check_schedule(schedule)
        if len(schedule.ranks) != self.group.size:
            raise ScheduleError(
                f"{schedule.name} is for {len(schedule.ranks)} ranks, this pipeline has {self.group.size}"
            )
        mine = [stage for stage, rank in schedule.stage_to_rank.items() if rank == self.group.index]
        if sorted(mine) != sorted(self.stages):
            raise ScheduleError(
                f"{schedule.name} has stages {sorted(mine)} on place {self.group.index} of the pipeline (rank "
                f"{world.get_rank()}), which holds {sorted(self.stages)}: make the layers' stages from this schedule's "
                "stage_to_rank"
            )
        self._proved = [*self._proved[1 - PROVED :], schedule]

    def compare(self, schedule: Schedule, inputs: Any, targets: Any) -> None:
        """Now and then, whether the rank that reads the inputs and the one that reads the targets were given one batch."""
        if self.group.size == 1 or not sparse_check.on.here:
            return
        if self._batches is None:
            where = f"pipeline of {list(self.group.ranks)} #{sparse_check.serial()}"
            self._batches = [sparse_check.site(name, partial(str, name)) for name in (f"{where}/x", f"{where}/y")]
        ends = schedule.stage_to_rank[0], schedule.stage_to_rank[schedule.num_stages - 1]
        due = [site.tick() for site in self._batches]
        if all(due) and self.group.index in ends and ends[0] != ends[1]:
            batches.compare(self._batches, f"{schedule.name}: a step of a pipeline", inputs, targets)

    def failed(self, what: str) -> None:
        """A step ended in the middle: what is under way would be taken for the next one's."""
        self._failed = what or "interrupted"
        for stage in self.stages.values():
            stage.forget()

    def timeline(self, name: str = "measured") -> Timeline:
        """What this rank computed in its last step, and when; join those of all ranks for the whole.

        On a GPU these are the times at which the host had issued the kernels.
        """
        return Timeline.of(self.spans, name)
