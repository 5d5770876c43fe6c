"""Runner: goes through a rank's list of actions, of any schedule, for the stages that this rank has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onecard.comm import world
from onecard.comm.ranks import Ranks, of_ranks
from onecard.comm.started import Started
from onecard.errors import CommunicationError, ScheduleError
from onecard.pipeline.action import COMPUTE, Action, Schedule, sent_by
from onecard.pipeline.check import check_schedule
from onecard.pipeline.links import Arriving, Link
from onecard.pipeline.meter import Meter
from onecard.pipeline.packets import Form, batch_size, signature, split
from onecard.pipeline.shared_loss import LossWord
from onecard.pipeline.stage import Stage
from onecard.pipeline.timing import Timeline

PROVED = 8  # schedules that are known to run: one for each number of microbatches in use


class Runner:
    """Runs the stages of this rank under a schedule: what it sends and receives is under way while it computes.

    Every rank of the group makes one, and calls ``step`` with the same schedule and the whole batch, as on one card. The
    gradients that ``step`` leaves in ``grad`` of the parameters are those of the loss of the whole batch.

    Args:
        stages: this rank's stages by number: modules, or functions of one value. What one returns, the next is given:
            tensors, or tuples, lists and dicts of them, so that also what only a later stage needs can be handed on.
        loss_fn: (what the last stage returns, its part of the targets) -> one number, a mean over the microbatch.
        group: the ranks of the pipeline, in the schedule's order; all if left out.
        around: makes the context of each forward, such as ``torch.autocast``.
        timeout: seconds that a message may take; that of the process group (``ONECARD_TIMEOUT``) if left out.

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
    ) -> None:
        self.group = of_ranks() if group is None else group
        self.device = world.device() if device is None else device
        self.loss_fn, self.timeout = loss_fn, timeout
        self.meter: Meter | None = None
        """Where one is set, what each stage keeps for its backward is counted."""
        self.spans: list[tuple[int, Action, float, float]] = []
        """When each computation of the last step began and ended, in seconds of this host's clock."""
        self._stages = {number: Stage(run, loss_fn, around) for number, run in stages.items()}
        self._proved: list[Schedule] = []

    def step(
        self,
        schedule: Schedule,
        inputs: Any,
        targets: Any = None,
        sizes: Sequence[int] | None = None,
        weights: Sequence[float | Tensor] | None = None,
        scale: float | Tensor = 1.0,
        share: bool = True,
    ) -> Tensor | None:
        """Forward and backward of a batch; gradients are added to those of the parameters.

        Args:
            schedule: proved before it first runs.
            inputs: of the whole batch, given on every rank: the first stage reads them, all others their shapes.
            targets: of the whole batch, for the loss.
            sizes: of the microbatches; as equal as can be if left out.
            weights: of each microbatch's loss in the mean; its part of the batch if left out.
            scale: what the gradients are multiplied with.
            share: whether every rank gets the loss; else the one with the last stage only, and None elsewhere.

        Returns:
            The weighted mean of the microbatches' losses: for means over samples, the loss of the batch.

        Raises:
            ScheduleError: a schedule that cannot run, or that these stages do not fit; a batch that does not divide.
            CommunicationError: a message that does not come; names the rank and the action that waited.
        """
        self._fit(schedule)
        with torch.enable_grad():
            run = _Run(self, schedule.ranks[self.group.index], schedule, inputs, targets, sizes, weights, scale)
            return run.go(share)

    @torch.no_grad()
    def evaluate(
        self, schedule: Schedule, inputs: Any, targets: Any = None, sizes: Sequence[int] | None = None,
        weights: Sequence[float | Tensor] | None = None, loss: bool = True, share: bool = True,
    ) -> Any:  # fmt: skip
        """The forwards of a schedule alone, without gradients.

        Returns:
            The loss, as of ``step``; or, with ``loss=False``, for each microbatch what the last stage returned: on the rank
            that has it, and None elsewhere.
        """
        self._fit(schedule)
        forward = ("F", "SEND_F", "RECV_F")
        row = tuple(action for action in schedule.ranks[self.group.index] if action.kind in forward)
        run = _Run(self, row, schedule, inputs, targets, sizes, weights, 1.0, loss)
        return run.go(share) if loss else run.outputs_after()

    def _fit(self, schedule: Schedule) -> None:
        """Prove a schedule, once, and that it means these ranks and stages."""
        if any(schedule is known for known in self._proved):
            return
        check_schedule(schedule)
        if len(schedule.ranks) != self.group.size:
            raise ScheduleError(
                f"{schedule.name} is for {len(schedule.ranks)} ranks, this pipeline has {self.group.size}"
            )
        mine = [stage for stage, rank in schedule.stage_to_rank.items() if rank == self.group.index]
        if sorted(mine) != sorted(self._stages):
            raise ScheduleError(
                f"{schedule.name} has stages {sorted(mine)} on place {self.group.index} of the pipeline (rank "
                f"{world.get_rank()}), which holds {sorted(self._stages)}: make the layers' stages from this schedule's "
                "stage_to_rank"
            )
        self._proved = [*self._proved[1 - PROVED :], schedule]

    def timeline(self, name: str = "measured") -> Timeline:
        """What this rank computed in its last step, and when; join those of all ranks for the whole.

        On a GPU these are the times at which the host had issued the kernels.
        """
        return Timeline.of(self.spans, name)


class _Run:
    """One step: what is under way on this rank."""

    def __init__(
        self, runner: Runner, row: Sequence[Action], schedule: Schedule, inputs: Any, targets: Any,
        sizes: Sequence[int] | None, weights: Any, scale: Any, with_loss: bool = True,
    ) -> None:  # fmt: skip
        self.runner, self.row, self.schedule = runner, early(row), schedule
        self.last = schedule.num_stages - 1
        self.with_loss, self.scale = with_loss, scale
        count = schedule.num_microbatches
        size = batch_size(inputs)
        self.sizes = list(sizes) if sizes is not None else _even(size, count)
        if len(self.sizes) != count or sum(self.sizes) != size or min(self.sizes) < 1:
            raise ScheduleError(
                f"{schedule.name} has {count} microbatches, but a batch of {size} is to be cut into {self.sizes}: give a "
                "schedule for as many as there are, each of 1 sample or more"
            )
        self.inputs = split(inputs, self.sizes, "the inputs")
        mine = runner._stages
        self.targets = split(targets, self.sizes, "the targets") if self.last in mine and targets is not None else None
        if with_loss and self.last in mine and (runner.loss_fn is None or targets is None):
            raise ScheduleError(
                "a step needs a loss: Runner(stages, loss_fn=...), and targets on the last stage's rank"
            )
        self.weights = [n / size for n in self.sizes] if weights is None else list(weights)
        self.keys = [(torch.is_grad_enabled(), signature(part)) for part in self.inputs]
        self.links: dict[int, Link] = {}
        self.arriving: dict[tuple[str, int, int], Arriving] = {}
        self.here: dict[tuple[str, int, int], tuple[Form | None, list[Tensor]]] = {}  # results by who wants them
        self.sent: list[tuple[int, Action, Started]] = []
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.word = LossWord(runner.group, schedule.stage_to_rank[self.last], runner.device)
        self.do = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight, "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward, "SEND_B": self._send_backward, "RECV_B": self._receive_backward,
        }  # fmt: skip

    def go(self, share: bool) -> Tensor | None:
        """Run the list; the loss."""
        self._go_through()
        last_here = self.last in self.runner._stages
        loss = self._mean() if last_here else None
        if share:
            if last_here and not self.word.sent:
                self.word.send(loss)
            elif not last_here:
                loss = self._waited(len(self.row), Action("F", self.last, 0), self.word.receive, "the loss")
        return loss

    def outputs_after(self) -> list[Any] | None:
        """Run the list; what the last stage returned."""
        self._go_through()
        return [self.outputs[i] for i in sorted(self.outputs)] if self.last in self.runner._stages else None

    def _go_through(self) -> None:
        self.runner.spans = []
        try:
            for position, action in enumerate(self.row):
                self.do[action.kind](position, action)
            for position, action, message in self.sent:
                self._waited(position, action, message.wait)
        except BaseException:
            for stage in self.runner._stages.values():
                stage.forget()
            raise

    # -- computing -------------------------------------------------------------------------------------------------

    def _forward(self, position: int, action: Action) -> None:
        _, stage, i = action
        form, tensors = self._taken(position, "F", action) if stage else Form.of(self.inputs[i])
        if not stage and any(slot.needs_grad for slot in form.slots):
            raise ScheduleError("an input of the pipeline requires a gradient, which no one would get: give x.detach()")
        begin = time.perf_counter()
        with self.runner.meter.forward(stage) if self.runner.meter else nullcontext():
            self._run_forward(stage, i, form, tensors)
        self._note(action, begin)

    def _run_forward(self, stage: int, i: int, form: Form, tensors: list[Tensor]) -> None:
        mine = self.runner._stages[stage]
        if stage < self.last:
            self.here["F", stage + 1, i] = mine.forward(i, form, tensors, stage)
        elif not self.with_loss:
            self.outputs[i] = mine.forward_output(form, tensors)
        else:
            target = self.targets[i] if self.targets is not None else None
            loss = mine.forward_loss(i, form, tensors, target, self.weights[i] * self.scale)
            if loss.numel() != 1:
                raise ScheduleError(f"loss_fn returned {list(loss.shape)}; want one number, the mean over a microbatch")
            self.losses[i] = loss.reshape(())
            if len(self.losses) == len(self.sizes) and self.word.at_once:
                self.word.send(self._mean())

    def _backward(self, position: int, action: Action) -> None:
        kind, stage, i = action
        grads = self._taken(position, "B", action)[1] if stage < self.last else []
        begin = time.perf_counter()
        mine = self.runner._stages[stage]
        found = mine.backward(i, grads) if kind == "B" else mine.backward_input(i, grads)
        if stage:
            self.here["B", stage - 1, i] = None, found
        self._note(action, begin)

    def _weight(self, position: int, action: Action) -> None:
        begin = time.perf_counter()
        self.runner._stages[action.stage].backward_weight(action.microbatch)
        self._note(action, begin)

    def _note(self, action: Action, begin: float) -> None:
        self.runner.spans.append((self.runner.group.index, action, begin, time.perf_counter()))

    def _mean(self) -> Tensor:
        total = sum(self.losses[i] * w for i, w in enumerate(self.weights))
        return total if isinstance(total, Tensor) else torch.as_tensor(total)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _link(self, action: Action) -> Link:
        earlier = action.stage if action.kind in ("SEND_F", "RECV_B") else action.stage - 1
        if earlier not in self.links:
            peer = self.schedule.stage_to_rank[earlier + 1 if earlier == action.stage else earlier]
            self.links[earlier] = Link(self.runner.group, earlier, peer, self.runner.device)
        return self.links[earlier]

    def _taken(self, position: int, what: str, action: Action) -> tuple[Any, list[Tensor]]:
        """The activation or the gradient that an action needs: of this rank, or received."""
        key = (what, action.stage, action.microbatch)
        if key in self.here:
            return self.here.pop(key)
        arriving = self.arriving.pop(key)
        receive = Action("RECV_" + what, action.stage, action.microbatch)
        return arriving.form, self._waited(position, receive, arriving.wait, before=action)

    def _send_forward(self, position: int, action: Action) -> None:
        form, tensors = self.here.pop(("F", action.stage + 1, action.microbatch))
        link = self._link(action)
        for message in link.send(action, self.keys[action.microbatch], form, tensors):  # type: ignore[arg-type]
            self.sent.append((position, action, message))

    def _receive_forward(self, position: int, action: Action) -> None:
        link, key = self._link(action), self.keys[action.microbatch]
        self.arriving["F", action.stage, action.microbatch] = self._waited(
            position, action, lambda timeout: link.receive(action, key, timeout)
        )

    def _send_backward(self, position: int, action: Action) -> None:
        _, grads = self.here.pop(("B", action.stage - 1, action.microbatch))
        self._link(action).send_gradients(action, grads)

    def _receive_backward(self, position: int, action: Action) -> None:
        form = self.runner._stages[action.stage].form_of(action.microbatch)
        link = self._link(action)
        self.arriving["B", action.stage, action.microbatch] = link.receive_gradients(action, form)

    def _waited(
        self, position: int, action: Action, wait: Callable[[Any], Any], what: str = "", before: Any = None
    ) -> Any:
        """What a message brings; the words for one that does not come."""
        try:
            return wait(self.runner.timeout)
        except CommunicationError as fault:
            raise CommunicationError(self._lost(position, action, what, before, fault)) from fault

    def _lost(self, position: int, action: Action, what: str, before: Action | None, fault: Exception) -> str:
        kind, stage, i = action
        if what:
            other, text = self.schedule.stage_to_rank[self.last], f"{what} from stage {self.last}"
        else:
            far = stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1
            other = self.schedule.stage_to_rank[far]
            thing = "activation" if kind[-1] == "F" else "gradient"
            text = (
                f"that stage {far} takes the {thing} of microbatch {i}"
                if kind.startswith("SEND")
                else f"{action}, the {thing} of microbatch {i} of stage {far} ({sent_by(action)})"
            )
        need = f", which {before} needs" if before else ""
        rank = self.runner.group.ranks[other]
        return (
            f"{self.schedule.name}: rank {world.get_rank()} at position {position} of {len(self.row)} waited for rank {rank}: "
            f"{text}{need}: {fault}"
        )


def early(row: Sequence[Action]) -> list[Action]:
    """The row with receives before the computations that they follow: they are under way while those run.

    No message passes another one, so what two ranks send each other keeps the order that was proved.

    Example:
        >>> early([Action.parse(a) for a in "0F0 0SEND_F0 0F1 0RECV_B0 0B0".split()])
        [0F0, 0SEND_F0, 0RECV_B0, 0F1, 0B0]
    """
    made: list[Action] = []
    for action in row:
        at = len(made)
        while action.kind in ("RECV_F", "RECV_B") and at and made[at - 1].kind in COMPUTE:
            at -= 1
        made.insert(at, action)
    return made


def _even(size: int, count: int) -> list[int]:
    """As equal as can be, longer ones first."""
    return [size // count + (i < size % count) for i in range(count)]
