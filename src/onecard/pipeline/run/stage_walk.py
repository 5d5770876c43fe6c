"""One step of a Runner: what is under way on this rank, and what each action does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_leaves
from onecard.comm.agree import sparse_check
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import pretend, world
from onecard.errors import CommunicationError, ScheduleError
from onecard.pipeline.run import batches
from onecard.pipeline.run.links import ArrivingGradients, ArrivingPacket, StageLink
from onecard.pipeline.run.packets import PacketForm, join, signature, split
from onecard.pipeline.run.runtime import Runtime, Walk
from onecard.pipeline.run.shared_loss import LossWord
from onecard.pipeline.run.shares import Shares
from onecard.pipeline.run.stage import Stage
from onecard.pipeline.schedule.action import COMPUTE, Action, Schedule, sent_by

KEPT = 64  # forms of what stages are given, by the shapes of microbatches


class StageRuntime(Runtime):
    """Stages that are functions, on ranks that tell each other their values; the arguments are those of ``Runner``."""

    def __init__(
        self,
        stages: Mapping[int, Callable[[Any], Any]],
        loss_fn: Callable[[Any, Any], Tensor] | None,
        group: Ranks,
        around: Callable[[], AbstractContextManager[Any]] | None,
        timeout: float | None,
        device: torch.device | None,
        halves: bool,
        given: Callable[[int, Any], Any] | None,
        beside: bool = False,
    ) -> None:
        super().__init__(group.index, group.size, list(stages))
        self.group, self.device = group, world.device() if device is None else device
        self.loss_fn, self.timeout, self.given = loss_fn, timeout, given
        self.shares = None if loss_fn is None else Shares(loss_fn)
        self.stages = {number: Stage(run, around, halves, beside) for number, run in stages.items()}
        self.beside = beside
        self._given: dict[Any, PacketForm] = {}
        self._batches: list[sparse_check.Site] | None = None

    def compare(self, schedule: Schedule, inputs: Any, targets: Any) -> None:
        """Now and then, whether the rank that reads the inputs and the one that reads the targets were given one batch."""
        if self.group.size == 1 or not sparse_check.on.here:
            return
        if self._batches is None:
            where = f"pipeline of {list(self.group.ranks)}"
            where = f"{where} #{sparse_check.serial(where)}"
            self._batches = [sparse_check.site(name, partial(str, name)) for name in (f"{where}/x", f"{where}/y")]
        ends = schedule.stage_to_rank[0], schedule.stage_to_rank[schedule.num_stages - 1]
        due = [site.tick() for site in self._batches]
        if all(due) and self.group.index in ends and ends[0] != ends[1]:
            batches.compare(self._batches, f"{schedule.name}: a step of a pipeline", inputs, targets)

    def form_given(self, stage: int, key: Any, value: Any) -> PacketForm:
        """In a pretended world: the form of what a stage would be given for such a microbatch of the inputs."""
        if (stage, key) not in self._given:
            while len(self._given) >= KEPT:
                self._given.pop(next(iter(self._given)))
            made = self.given(stage, value) if self.given is not None else value
            self._given[stage, key] = PacketForm.of(made, stage - 1)[0]
        return self._given[stage, key]

    def failed(self, what: str) -> None:
        """A step ended in the middle: what is under way would be taken for the next one's."""
        super().failed(what)
        for stage in self.stages.values():
            stage.forget()


class StageWalk(Walk):
    """One step: what is under way on this rank."""

    def __init__(
        self, runner: StageRuntime, row: Sequence[Action], schedule: Schedule, inputs: Any, targets: Any,
        sizes: Sequence[int] | None, weights: Any, scale: Any, with_loss: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(runner, schedule, early(row), inputs, sizes)
        self.runner = runner
        self.with_loss, self.scale = with_loss, scale
        if any(
            isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(inputs)
        ):  # on all ranks, which all have it
            raise ScheduleError("an input of the pipeline requires a gradient, which no one would get: give x.detach()")
        mine = runner.stages
        runner.compare(schedule, inputs, targets)
        self.targets = split(targets, self.sizes, "the targets") if self.last in mine and targets is not None else None
        if with_loss and self.last in mine and (runner.loss_fn is None or targets is None):
            raise ScheduleError(
                "a step needs a loss: Runner(stages, loss_fn=...), and targets on the last stage's rank"
            )
        self.whole = targets
        self.weights: list[Any] | None = None if weights is None else list(weights)
        self.seen = False  # whether weights are what was seen of the loss, and not what the user says
        if runner.meter:
            runner.meter.leave_out(x for x in tree_leaves((inputs, targets)) if isinstance(x, Tensor))
        self.keys = [(torch.is_grad_enabled(), signature(part)) for part in self.inputs]
        self.links: dict[int, StageLink] = {}
        self.arriving: dict[tuple[str, int, int], ArrivingPacket | ArrivingGradients] = {}
        self.here: dict[tuple[str, int, int], tuple[PacketForm | None, list[Any]]] = {}  # results by who wants them
        self.sent: list[tuple[int, Action, Handle]] = []
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.word = LossWord(runner.group, schedule.stage_to_rank[self.last], runner.device)
        self.do = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weight, "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward, "SEND_B": self._send_backward, "RECV_B": self._receive_backward,
        }  # fmt: skip

    def go(self, share: bool) -> Tensor | None:
        """Run the list; the loss."""
        self.go_through()
        last_here = self.last in self.runner.stages
        loss = self._mean() if last_here else None
        if share:
            if last_here and not self.word.sent:
                self.word.send(loss)
            elif not last_here:
                loss = self._waited(len(self.row), Action("F", self.last, 0), self.word.receive, "the loss")
        return loss

    def outputs_after(self, share: bool) -> Any:
        """Run the list; what the last stage returned."""
        self.go_through()
        group, home = self.runner.group, self.schedule.stage_to_rank[self.last]
        action = Action("F", self.last, 0)
        if self.last in self.runner.stages:
            whole = join([self.outputs[i] for i in range(len(self.sizes))])
            form, tensors = PacketForm.of(whole, self.last)
            for place in range(group.size) if share else ():
                if place != group.index:
                    StageLink(group, self.last, place, self.runner.device).send(action, None, form, tensors)
            return whole
        if not share:
            return None
        link = StageLink(group, self.last, home, self.runner.device)

        def receive(timeout: float | None) -> Any:
            arriving = link.receive(action, None, timeout)
            return arriving.form.join(arriving.wait(timeout))

        return self._waited(len(self.row), action, receive, "the outputs")

    def finish(self) -> None:
        for position, action, message in self.sent:
            self._waited(position, action, message.wait)

    # -- computing -------------------------------------------------------------------------------------------------

    def _forward(self, position: int, action: Action) -> None:
        _, stage, i = action
        form, tensors = self._taken(position, "F", action) if stage else PacketForm.of(self.inputs[i])
        begin = time.perf_counter()
        with self.counted(stage):
            self._run_forward(stage, i, form, tensors)
        self.note(action, begin)

    def _run_forward(self, stage: int, i: int, form: PacketForm, tensors: list[Tensor]) -> None:
        mine = self.runner.stages[stage]
        if stage < self.last:
            self.here["F", stage + 1, i] = mine.forward(i, form, tensors, stage)
        elif not self.with_loss:
            self.outputs[i] = mine.forward_output(form, tensors)
        else:
            target = self.targets[i] if self.targets is not None else None
            share = self.sizes[i] / sum(self.sizes)
            loss = mine.forward_loss(i, form, tensors, partial(self._loss_of, i, target), self.scale, share)
            self.losses[i] = loss.reshape(())
            if len(self.losses) == len(self.sizes) and self.word.at_once:
                self.word.send(self._mean())

    def _loss_of(self, i: int, target: Any, value: Any) -> tuple[Any, Any]:
        """A microbatch's loss, and what it weighs; found out when the first value is there."""
        shares, given = self.runner.shares, self.weights is not None and not self.seen
        if shares is not None and self.targets is not None and not given:
            self.seen = True
            loss, self.weights = shares.lose(value, i, self.targets, self.whole, self.sizes, self.weights)
            return loss, self.weights[i]
        weight = self.weights[i] if self.weights is not None else self.sizes[i] / sum(self.sizes)
        loss_fn = self.runner.loss_fn
        return (loss_fn(value, target) if weight and loss_fn is not None else None), weight

    def _backward(self, position: int, action: Action) -> None:
        kind, stage, i = action
        grads = self._taken(position, "B", action)[1] if stage < self.last else []
        begin = time.perf_counter()
        mine = self.runner.stages[stage]
        found = mine.backward(i, grads) if kind == "B" else mine.backward_input(i, grads)
        if stage:
            self.here["B", stage - 1, i] = None, found
        self.note(action, begin)

    def _weight(self, position: int, action: Action) -> None:
        begin = time.perf_counter()
        self.runner.stages[action.stage].backward_weight(action.microbatch)
        self.note(action, begin)

    def _mean(self) -> Tensor:
        weights = [1.0] * len(self.sizes) if self.runner.beside else self.weights or []
        total = torch.stack([self.losses[i].double() * w for i, w in enumerate(weights)]).sum()
        return total.to(next((self.losses[i].dtype for i, w in enumerate(weights) if w), torch.float32))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _link(self, action: Action) -> StageLink:
        earlier = action.stage if action.kind in ("SEND_F", "RECV_B") else action.stage - 1
        if earlier not in self.links:
            peer = self.schedule.stage_to_rank[earlier + 1 if earlier == action.stage else earlier]
            self.links[earlier] = StageLink(self.runner.group, earlier, peer, self.runner.device)
        return self.links[earlier]

    def _taken(self, position: int, what: str, action: Action) -> tuple[Any, list[Any]]:
        """The activation or the gradients (None: there is none) that an action needs: of this rank, or received."""
        key = (what, action.stage, action.microbatch)
        if key in self.here:
            return self.here.pop(key)
        arriving = self.arriving.pop(key)
        receive = Action("RECV_" + what, action.stage, action.microbatch)
        return arriving.form, self._waited(position, receive, arriving.wait, before=action)

    def _send_forward(self, position: int, action: Action) -> None:
        form, tensors = self.here.pop(("F", action.stage + 1, action.microbatch))
        link, key = self._link(action), self.keys[action.microbatch]
        if form is not None:
            sent = self._waited(position, action, lambda _: link.send(action, key, form, tensors))
            self.sent += [(position, action, message) for message in sent]

    def _receive_forward(self, position: int, action: Action) -> None:
        link, key = self._link(action), self.keys[action.microbatch]
        if self.runner.given is not None and pretend.pretending():
            link.know(key, self.runner.form_given(action.stage, key, self.inputs[action.microbatch]))
        begun = self._waited(position, action, lambda timeout: link.receive(action, key, timeout))
        self.arriving["F", action.stage, action.microbatch] = begun

    def _send_backward(self, position: int, action: Action) -> None:
        _, grads = self.here.pop(("B", action.stage - 1, action.microbatch))
        link = self._link(action)
        key = self.keys[action.microbatch]
        self._waited(position, action, lambda _: link.send_gradients(action, key, grads))

    def _receive_backward(self, position: int, action: Action) -> None:
        form = self.runner.stages[action.stage].form_of(action.microbatch)
        link = self._link(action)
        begun = self._waited(position, action, lambda _: link.receive_gradients(action, form))
        self.arriving["B", action.stage, action.microbatch] = begun

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
