"""PipelineParallel: what ``fleet.distributed_model`` makes of a PipelineLayer: train_batch, eval_batch, forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base.warned import warn
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.experts.staged import has_routers, routed_stage
from onecard.fleet.front.wrapped import DistributedModel
from onecard.fleet.gradients import hooks
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.scaling import GradScaler
from onecard.fleet.grid.strategy import DistributedStrategy
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.fleet.layers.tied_layers import LayersElsewhere
from onecard.fleet.layers.tokens import weighed
from onecard.fleet.zero.local_parameter import has_users_hooks
from onecard.pipeline import Action, Meter, Runner, Schedule, Timeline
from onecard.pipeline.run import no_graph
from onecard.pipeline.run.packets import batch_size, split
from onecard.pipeline.run.waiting_hooks import hooks_wait
from onecard.pipeline.schedule.action import COMPUTE

PLANS = 16  # schedules that are kept, one for each number of microbatches

_TRAINS = (
    "train_batch: the model was in evaluation (model.eval()), and trains again, as Paddle's train_batch has it. To train in that "
    "mode: model.forward_backward_pipeline([x, y]), optimizer.step(); to end it before: model.train()"
)


class PipelineParallel(DistributedModel):
    """A pipeline's part on this rank. Every rank calls its methods alike, each time with the whole batch.

    Source: ``paddle.distributed.fleet.meta_parallel.PipelineParallel``.
    """

    def __init__(
        self,
        module: PipelineLayer,
        data: Ranks,
        strategy: DistributedStrategy,
        grad_accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(module, data, strategy, grad_accum_dtype)
        self._layers = (module,)  # in a tuple: it is a submodule already
        self._steps = strategy.pipeline_configs["accumulate_steps"]
        self._size = strategy.pipeline_configs["micro_batch_size"]
        self._plans: dict[int, Schedule] = {}
        self.begins: Callable[[], None] = lambda: None  # called before a batch, which no hook of a forward is
        self._elsewhere = LayersElsewhere(module.descs, module.parameters())
        routed = has_routers(module, module.group)
        self._runner = Runner(
            {stage: partial(routed_stage if routed else _stage, module, stage) for stage in module.stages},
            module.loss_fn,
            module.group,
            self._around() if self._amp is not None else None,
            halves=not module.recompute_interval,
            given=partial(_given_routed, module) if routed else module.given,
            beside=routed,
        )
        self._runner.hooks = lambda: hooks_wait(_without_wrapped_hooks(module.parameters()), gradients.sync)

    def _around(self) -> Callable[[], AbstractContextManager[Any]]:
        kind = next((p.device.type for p in self.module.parameters()), "cpu")
        return partial(torch.autocast, kind, self._amp)

    def train_batch(self, data: Any, optimizer: Any, lr_scheduler: Any = None, scaler: Any = None) -> Tensor:
        """One step: forward and backward of all microbatches, then the optimizer, which is cleared.

        Args:
            data: ``[inputs, labels]`` of the whole batch, on every rank.
            optimizer: a torch optimizer of this rank's parameters.
            lr_scheduler: stepped after it.
            scaler: a ``fleet.GradScaler``.

        Returns:
            The loss of the batch, on every rank.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise FleetError(
                f"train_batch([x, y], optimizer): want a torch optimizer of model.parameters(), not {type(optimizer).__name__}"
            )
        if not self.module.training:
            warn(_TRAINS)
            self.module.train()
        loss = self.forward_backward_pipeline(data, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if lr_scheduler is not None:
            lr_scheduler.step()
        optimizer.zero_grad()
        no_graph.last.here = "train_batch"
        return loss

    def forward_backward_pipeline(self, data: Any, scaler: Any = None) -> Tensor:
        """The gradients of a batch alone, added to those that are there; the loss on every rank."""
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise FleetError(
                "a torch GradScaler looks at this rank's gradients alone, and stages would step or skip apart: "
                "fleet.distributed_scaler(scaler)"
            )
        inputs, labels = _pair(data)
        sizes = self._sizes(batch_size(inputs))
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self._runner.device))
        self._begin()
        self.begins()
        self._elsewhere.begin()
        weights = self._weights(labels, sizes)
        with _weighed(weights), hooks.in_stages([*self.module.parameters()]):
            loss = self._runner.step(self._plan(len(sizes)), inputs, labels, sizes, weights, scale)
        self._elsewhere.check(self._layers[0].stages)
        self._compare()
        no_graph.last.here = "forward_backward_pipeline"
        if loss is None:
            raise FleetError("the loss did not reach this rank")
        return loss

    def eval_batch(self, data: Any, compute_loss: bool = True) -> Any:
        """The loss of a batch in evaluation, without gradients; or, with ``compute_loss=False``, what the last layer returns.

        The batch may have any size. Modules are in evaluation mode during it.
        """
        inputs, labels = _pair(data) if compute_loss else (data[0] if isinstance(data, list | tuple) else data, None)
        with self._evaluating():
            if not compute_loss:
                return self.forward(inputs)
            sizes = self._any_sizes(batch_size(inputs))
            weights = self._weights(labels, sizes)
            with _weighed(weights):
                return self._runner.evaluate(self._plan(len(sizes)), inputs, labels, sizes, weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the last layer returns for a batch, on every rank, without gradients: ``train_batch`` has those."""
        if len(args) != 1 or kwargs:
            raise FleetError(
                "a pipeline's model takes one value: a tensor, or a tuple of them, which goes to the first layer"
            )
        sizes = self._any_sizes(batch_size(args[0]))
        return self._runner.evaluate(self._plan(len(sizes)), args[0], sizes=sizes, loss=False)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Modules in evaluation, and each as it was after it."""
        training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def schedule(self, microbatches: int | None = None) -> Schedule:
        """The schedule that runs, of ``accumulate_steps`` microbatches if left out."""
        return self._plan(self._steps if microbatches is None else microbatches)

    def timeline(self) -> Timeline:
        """When each rank of this pipeline computed what in the last step; each of them calls it.

        By this host's clock: ranks on several hosts are not comparable. ``timeline.times()`` is what ``pipeline.zb_auto`` takes.
        """
        group, device = self._layers[0].group, self._runner.device
        spans = self._runner.spans
        mine = [[COMPUTE.index(a.kind), a.stage, a.microbatch, start, end] for _, a, start, end in spans]
        count = torch.tensor([len(mine)], device=device)
        sizes = plain.all_gather(count, group, call="timeline").tolist()
        rows = torch.tensor(mine, dtype=torch.float64, device=device).reshape(-1, 5)
        all_rows = plain.all_gather(rows, group, 0, sizes, call="timeline").split(sizes)
        return Timeline.of(
            [
                (rank, Action(COMPUTE[int(kind)], int(stage), int(i)), start, end)
                for rank, part in enumerate(all_rows)
                for kind, stage, i, start, end in part.tolist()
            ]
        )

    def measure_memory(self) -> Meter:
        """Count from now on what is kept for backward: ``meter.peak``, in bytes, and ``meter.stages``."""
        self._runner.meter = Meter([*self.module.parameters(), *self.module.buffers()])
        return self._runner.meter

    def _plan(self, microbatches: int) -> Schedule:
        found = self._plans.get(microbatches)
        if found is None:
            if len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            found = self._plans[microbatches] = self._layers[0].schedule(microbatches)
        return found

    def _sizes(self, size: int) -> list[int]:
        """Of the microbatches of a training batch: the last may be smaller."""
        steps, each = self._steps, self._size
        if not (steps - 1) * each < size <= steps * each:
            better = f'"micro_batch_size": {-(-size // steps)}' if size >= steps else f'"accumulate_steps": {size}'
            raise FleetError(
                f"a batch of {size} is not accumulate_steps {steps} x micro_batch_size {each} = {steps * each}, of which the "
                f"last microbatch alone may be smaller: strategy.pipeline_configs = {{{better}, ...}}, or a "
                "loader with drop_last=True"
            )
        return [each] * (steps - 1) + [size - (steps - 1) * each]

    def _any_sizes(self, size: int) -> list[int]:
        return [min(self._size, size - at) for at in range(0, size, self._size)]

    def _weights(self, labels: Any, sizes: list[int]) -> list[Any] | None:
        module = self._layers[0]
        if module.num_stages - 1 not in module.stages or module.loss_weight is None:
            return None
        return loss_weights(module.loss_weight, split(labels, sizes, "the labels"))


@contextmanager
def _weighed(weights: Sequence[float] | None) -> Iterator[None]:
    before, weighed.here = weighed.here, weights is not None and len(weights) > 1
    try:
        yield
    finally:
        weighed.here = before


def _stage(module: PipelineLayer, stage: int, value: Any) -> Any:
    return module.run_stage(stage, value)


def _given_routed(module: PipelineLayer, stage: int, value: Any) -> Any:
    return module.given(stage, value), torch.zeros((), device="meta", requires_grad=True)


def loss_weights(counted: Callable[[Any], Any] | None, parts: Sequence[Any]) -> list[float] | None:
    """What each microbatch's loss weighs in that of the batch, if the user says it.

    Example:
        >>> labels = [torch.tensor([1, -100]), torch.tensor([0, 1])]
        >>> [round(w, 3) for w in loss_weights(lambda y: (y != -100).sum(), labels)]
        [0.333, 0.667]
    """
    counts = [] if counted is None else [float(counted(part)) for part in parts]
    return [count / sum(counts) for count in counts] if any(counts) else None


def _without_wrapped_hooks(parameters: Iterable[Any]) -> Iterator[Any]:
    for p in parameters:
        if has_users_hooks(p):
            raise FleetError(
                f"a hook of a parameter {list(p.shape)}, in a pipeline under group_sharded_parallel, would see each "
                "microbatch's gradient: change p.grad after forward_backward_pipeline, which has the batch's, or leave "
                "group_sharded_parallel out"
            )
        yield p


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, list | tuple) or len(data) != 2:
        raise FleetError(
            f"train_batch and eval_batch take [inputs, labels], on every rank; not {type(data).__name__}"
            + (
                f" of {len(data)}: several inputs are a tuple, [(x, mask), labels]"
                if isinstance(data, list | tuple)
                else ""
            )
        )
    return data[0], data[1]
