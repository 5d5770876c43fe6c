"""Runner: goes through a rank's list of actions, of any schedule, for the stages that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from onecard.comm.agree.joint import joint_step
from onecard.comm.base.state import arrives
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import ScheduleError
from onecard.pipeline.run import no_graph
from onecard.pipeline.run.links import EVALUATION, STEP, own_messages
from onecard.pipeline.run.stage_walk import StageRuntime, StageWalk
from onecard.pipeline.run.waiting_hooks import hooks_wait
from onecard.pipeline.schedule.action import Schedule


class Runner(StageRuntime):
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
        given: in a pretended world, where nothing arrives: (stage, a microbatch of the inputs) -> a value of the shapes, dtypes
            and ``requires_grad`` that the stage would be given; of the meta device will do.
        beside: stages take and give (value, number), the first takes the value alone: the number that comes out is added to
            the loss, of each microbatch by its share of the batch.

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
        given: Callable[[int, Any], Any] | None = None,
        beside: bool = False,
    ) -> None:
        super().__init__(
            stages, loss_fn, of_ranks() if group is None else group, around, timeout, device, halves, given, beside
        )
        modules = [run for run in stages.values() if isinstance(run, nn.Module)]
        self.hooks: Callable[[], AbstractContextManager[Any]] = lambda: hooks_wait(
            p for m in modules for p in m.parameters()
        )
        """Makes the context of a step's backwards, in which hooks of parameters wait for the whole gradient."""

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
        with joint_step(STEP, self.group.ranks), own_messages(self.group), torch.enable_grad(), self.hooks():
            self._fit(schedule)
            run = StageWalk(self, schedule.ranks[self.group.index], schedule, inputs, targets, sizes, weights, scale)
            no_graph.last.here = "Runner.step"
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
        with joint_step(EVALUATION, self.group.ranks), own_messages(self.group):
            self._fit(schedule)
            forward = ("F", "SEND_F", "RECV_F")
            row = tuple(action for action in schedule.ranks[self.group.index] if action.kind in forward)
            run = StageWalk(self, row, schedule, inputs, targets, sizes, weights, 1.0, loss)
            return run.go(share) if loss else run.outputs_after(share)

    def _fit(self, schedule: Schedule) -> None:
        """Prove a schedule, once, and that it means these ranks and stages."""
        if self.group.size > 1 and not arrives() and self.given is None:
            raise ScheduleError(
                "a pipeline's stages tell each other what they send, and in a pretended world nothing arrives: say what a "
                "stage would be given, Runner(..., given=lambda stage, x: torch.empty(len(x), 64, requires_grad=True)); "
                "fleet.PipelineLayer knows it"
            )
        self.fit(schedule)
