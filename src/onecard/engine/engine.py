"""Engine: a model, a loss and an optimizer as one recorded step, laid out over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from onecard._torch.names import tree_map
from onecard.comm.world import world
from onecard.engine import again, full, lists, loop, made_of, programs, refused, saved
from onecard.engine import step as steps
from onecard.engine.loaders import EngineLoader, loader_of
from onecard.engine.metrics import held
from onecard.engine.options import pipeline_degree, scaler_of, skips_on_device, static_options
from onecard.engine.placing import MeshPlace, in_16_bits, placed
from onecard.engine.specs import Feed, Splitter, specs_of
from onecard.engine.strategy import Strategy
from onecard.errors import EngineError
from onecard.machine.cost import MACHINE, Machine
from onecard.planning.search.plans import Plans
from onecard.static.api import Static
from onecard.static.api import to_static as recorded
from onecard.static.price.price import Cost
from onecard.static.recording import Recording
from onecard.tensor import DistTensor, manual_seed, unshard

SHAPES = 8  # of batches, each with a recording of its own


class Engine:
    """Trains, evaluates and predicts with a one-card model over all ranks: its step is recorded once and replayed.

    Args:
        model: as for one card, or with marks (``oc.shard_tensor``, ``oc.shard_layer``). Without marks all ranks divide the batch.
        loss: ``loss(outputs, labels)``, a function or a module, also with parameters of its own; several outputs, or labels, are
            several arguments. None: the model returns its loss (``outputs.loss``), as those of transformers do.
        optimizer: one of torch's, or several; of the model's parameters.
        metrics: ``onecard.Accuracy``, metrics of torchmetrics, or several.
        strategy: how the step runs. It is copied.
        scheduler: of learning rates: ``fit`` steps it after each step, or after each epoch with ``scheduler_each="epoch"``
            (``ReduceLROnPlateau`` always, with the validation's loss), and saves it.
        clip_grad_norm: the largest norm of the gradients of all that the optimizers train, together; None: they are not clipped.

    Raises:
        StrategyError: fields of the strategy that do not go together.
        EngineError: what cannot be a part of a step.

    Parameters stay the objects that they are, and keep their names. A step is recorded at its second call
    (``onecard.to_static``).

    Source: ``paddle.distributed.auto_parallel.Engine``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 3)
        >>> engine = Engine(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        >>> data = [(torch.full((4,), float(i)), i % 3) for i in range(12)]
        >>> history = engine.fit(data, batch_size=4, epochs=2, verbose=0)
        >>> len(history.losses), sorted(history.epochs[-1])
        (6, ['epoch', 'loss'])
        >>> sorted(engine.evaluate(data, batch_size=5, verbose=0))
        ['loss']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        metrics: Any = None,
        strategy: Strategy | Mapping[str, Any] | None = None,
        *,
        scheduler: Any = None,
        scheduler_each: str = "step",
        clip_grad_norm: float | None = None,
    ) -> None:
        self._optimizers = made_of.checked(model, loss, optimizer, clip_grad_norm, scheduler_each)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.strategy = Strategy(strategy).owned_by("an Engine")
        refused.check(self.strategy)
        self._around = None
        if (self.strategy.amp.custom_white_list or self.strategy.amp.custom_black_list) and self.strategy.amp.enable:
            lists.lists_of(self.strategy.amp)
            amp = self.strategy.amp
            self._around = lambda: lists.lists_of(amp)
        self.metrics = held(metrics)
        self.scheduler, self.scheduler_each, self.clip_grad_norm = scheduler, scheduler_each, clip_grad_norm
        self.scaler: Any = None
        self.stop_training = False
        self.mode = "train" if self._optimizers else "eval" if loss is not None else "predict"
        self._place: MeshPlace | None = None
        self._steps: dict[str, dict[Any, Static]] = {}  # by mode and shapes of a batch
        self._split = Splitter(model.forward, loss is not None)
        self._most: dict[str, int] = {}  # rows of the longest batch so far, by mode
        self._full: dict[str, int] = {}  # and of a full one, where that is known ahead
        self._skeleton: programs.Skeleton | None = None
        self.seen: dict[str, Feed] = {}  # shapes of a batch, by mode
        self.plans: Plans | None = None  # those that were found, best first

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, made_of.set_again(self, name, value) if "plans" in vars(self) else value)

    # preparing

    def prepare(
        self, inputs_spec: Any = None, labels_spec: Any = None, mode: str | None = None, *, sample_split: int = 0
    ) -> None:
        """Lay the model and the optimizers out, and say what a batch is.

        Args:
            inputs_spec, labels_spec: ``InputSpec``, or several: shapes and dtypes of the whole batch, which later ones must have.
                Without them a batch of two entries is (inputs, labels).
            mode: "train", "eval" or "predict": what ``run`` does if it is not told.
            sample_split: how many of a batch's entries are inputs; those of ``inputs_spec``, or all but the last.

        Raises:
            EngineError: a mode that there is not, or for which a loss or an optimizer is missing.
            StrategyError: degrees that do not fit the ranks or the model's mesh; a pipeline.
        """
        self.to_mode(mode or self.mode)
        inputs, labels = specs_of(inputs_spec, "inputs_spec"), specs_of(labels_spec, "labels_spec")
        if inputs is not None or labels is not None or sample_split:
            self._split = Splitter(self.model.forward, self.loss is not None, inputs, labels, sample_split)
        if full.is_wanted(self):
            self._plan_for(full.of_specs(inputs, labels))
        if not full.is_wanted(self):
            self.place()

    def look_at(self, data: Any, batch_size: int, collate_fn: Any = None, sample_split: int = 0) -> None:
        """With ``auto_mode="full"``: find the plan for batches of these data, unless there is one."""
        if full.is_wanted(self):
            if sample_split:
                self._split = Splitter(self.model.forward, self.loss is not None, split=sample_split)
            self._plan_for(full.example(data, batch_size, collate_fn))

    def expect(self, batch_size: int) -> None:
        """How many rows batches of the present mode have: the first that is met may be the last of a pass, which is shorter."""
        self._full[self.mode] = batch_size

    def _plan_for(self, batch: Any) -> None:
        """Lay the model out as the plan says that is found for a whole batch; None: nothing says yet what one is."""
        if batch is not None:
            self.plans = full.found_for(self, self._split(batch, "train"))
            full.apply(self, self.plans, self._optimizers)

    def to_mode(self, mode: str) -> None:
        """What ``run`` does from now on: "train", "eval" or "predict"."""
        if mode not in steps.MODES:
            raise EngineError(f"Engine: mode={mode!r}: want one of {', '.join(map(repr, steps.MODES))}")
        if mode == "train" and not self._optimizers:
            raise EngineError(
                "Engine: mode='train' takes an optimizer: Engine(model, loss, torch.optim.AdamW(model.parameters()))"
            )
        self.mode = mode

    def _check_optimizers(self) -> None:
        """An optimizer made of another model would train nothing, in silence."""
        held = {id(p) for module in self._parts().modules for p in module.parameters()}
        for optimizer in self._optimizers:
            params = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
            if held and params and held.isdisjoint(map(id, params)):
                raise EngineError(
                    f"Engine: {type(optimizer).__name__} has no parameter of the model, so that it would train nothing. "
                    "Make it of this one: Engine(model, loss, torch.optim.AdamW(model.parameters()))"
                )

    def place(self) -> MeshPlace:
        """Where the model and the batch lie; lays them out at the first call."""
        if full.is_wanted(self):
            raise full.unknown()
        if self._place is None:
            static_options(self.strategy, self.mode, world.get_world_size(), programs.mesh_of(self.model))
            for module in self._parts().modules:
                steps.own_train(module)
            self._check_optimizers()
            self._skeleton = programs.skeleton(self._parts())
            if self.strategy.seed is not None:
                manual_seed(self.strategy.seed)
            self._place = self.arranged(self._parts(), self.strategy)
            self.scaler = scaler_of(self.strategy, self._place.device or world.device())
            for optimizer in self._optimizers if self.scaler is not None else ():
                skips_on_device(optimizer)
        return self._place

    @staticmethod
    def arranged(parts: steps.EngineParts, strategy: Strategy) -> MeshPlace:
        """Make the parts of a step what a strategy says: 16-bit parameters, modules that are run again, layouts."""
        if strategy.amp.enable and strategy.amp.level == "O2":
            in_16_bits(parts.model, getattr(torch, strategy.amp.dtype))
        if strategy.recompute.enable and strategy.recompute.checkpoints:
            again.recompute_in(parts.model, strategy.recompute.checkpoints)
        return placed(parts.modules, parts.optimizers, strategy)

    @property
    def has_loss(self) -> bool:
        """Whether a loss was given."""
        return self.loss is not None

    def dataloader(
        self,
        dataset: Any,
        batch_size: int = 1,
        epochs: int = 1,
        mode: str | None = None,
        collate_fn: Any = None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        steps_per_epoch: int | None = None,
        sample_split: int = 0,
        **options: Any,
    ) -> EngineLoader:
        """A loader of whole batches, of which each rank reads its part.

        Args:
            dataset: any of torch's; or a DataLoader.
            batch_size: samples of the whole batch, over all ranks.
            epochs: for Paddle's programs: each iteration over the loader is one pass.
            shuffle, drop_last, and options: as of ``torch.utils.data.DataLoader``.

        Raises:
            EngineError: the dataset is empty, or shorter than a batch that is trained on.
        """
        self.look_at(dataset, batch_size, collate_fn, sample_split)
        self.prepare(mode=mode, sample_split=sample_split)
        options |= {"shuffle": shuffle or None, "drop_last": drop_last, "collate_fn": collate_fn}
        found = loader_of(dataset, self.place(), batch_size, self.mode == "train", steps_per_epoch, **options)
        return found

    # one batch

    def run(self, data: Any, mode: str | None = None) -> dict[str, Any]:
        """One step.

        Args:
            data: a batch of ``dataloader``; or a whole batch of tensors, the same on every rank.
            mode: "train", "eval" or "predict"; that of ``prepare`` if left out.

        Returns:
            "loss", the whole batch's on every rank, and the metrics of this batch; of "predict" "outputs", whole.

        Raises:
            EngineError: nothing was prepared; a batch that does not fit; a loss that is no number; a metric that fails.
        """
        if self._place is None:
            raise EngineError(
                f"Engine.run(mode={mode or self.mode!r}): the engine is not prepared: call engine.prepare(inputs_spec, "
                "labels_spec, mode='train'), or read batches from engine.dataloader(dataset, batch_size)"
            )
        if mode is not None:
            self.to_mode(mode)
        for metric in self.metrics:
            metric.reset()
        logs, _ = self.step(data, self.mode)
        for metric in self.metrics if self.mode != "predict" else ():
            logs |= metric.values()
        return logs

    def step(self, data: Any, mode: str) -> tuple[dict[str, Any], int]:
        """One step, and how many samples it took; metrics count on until they are reset."""
        feed = self._feed(data, mode)
        if feed.rows > self._most.get(mode, 0):
            self.seen[mode] = programs.Shape.of(feed)
        for metric in self.metrics:
            metric.mode = mode
        with steps.in_mode(self._parts().modules, mode):
            found = self._step(mode, feed)(feed.args, feed.kwargs, feed.labels)
        if mode == "predict":
            return {"outputs": whole(found)}, feed.rows
        loss, outputs, counted = found
        outside = any(not metric.in_step for metric in self.metrics)
        outputs, labels = whole((outputs, feed.labels)) if outside else (None, ())
        given = iter(counted)
        for metric in self.metrics:
            metric.update(next(given) if metric.in_step else None, outputs, labels)
        return {"loss": np.float64(loss.item())}, feed.rows

    def _feed(self, data: Any, mode: str) -> Feed:
        """A batch taken apart and laid out."""
        return self._split(data, mode).mapped(self.place().lay_out)

    def _step(self, mode: str, feed: Feed) -> Static:
        """The recorded step for batches of one shape; for the ninth shape, and all later ones, one together."""
        place, rows = self.place(), feed.rows
        options = static_options(self.strategy, mode, world.get_world_size(), place.mesh)
        parts = int(np.prod([place.mesh.shape[place.mesh.axis(axis)] for axis in place.axes]))
        self._most[mode] = max(rows, self._most.get(mode, 0))
        longest = max(self._most[mode], self._full.get(mode, 0))
        staged = options.get("stages")
        count = options.get("k_steps", 1) if staged is None else staged.k_steps
        if rows % (parts * count) and count > 1:
            if rows == longest:
                raise EngineError(
                    f"Engine: a batch of {rows} rows cannot be cut in {count} microbatches on each of {parts} rank(s): want a "
                    f"batch_size that {parts * count} divides"
                )
            options = {name: value for name, value in options.items() if name not in ("k_steps", "avg")}
            if staged is not None:
                options["stages"] = replace(staged, k_steps=1)
        micro = self.strategy.pipeline.micro_batch_size
        if mode == "train" and staged is not None and micro > 1 and rows == longest != parts * count * micro:
            raise EngineError(
                f"Engine: batch_size={rows}: accumulate_steps={count} microbatches of micro_batch_size={micro} rows on each of "
                f"{parts} rank(s) are {parts * count * micro}"
            )
        steps_of_mode = self._steps.setdefault(mode, {})
        key = feed.shapes if feed.shapes in steps_of_mode or len(steps_of_mode) < SHAPES else "others"
        if key not in steps_of_mode:
            steps_of_mode[key] = recorded(steps.STEPS[mode](self._parts()), **options)
        return steps_of_mode[key]

    def _parts(self) -> steps.EngineParts:
        plain = (
            self._place is not None
            and self._place.plain
            and pipeline_degree(self.strategy, world.get_world_size(), None) == 1
        )
        return steps.EngineParts(
            self.model, self.loss, self._optimizers, self.metrics, self.clip_grad_norm, self.scaler, self._around, plain
        )

    # passes over data

    fit = loop.fit
    evaluate = loop.evaluate
    predict = loop.predict

    # on disk

    save = saved.save
    load = saved.load

    # programs

    def cost(self, mode: str | None = None, machine: Machine = MACHINE, batch_size: int | None = None) -> Cost:
        """What a step takes on this rank: time, memory, messages, by the price of its recording.

        Args:
            batch_size: rows, where specs leave them open and no batch has been seen.
        """
        return programs.main_program(self, mode or self.mode, batch_size).cost(machine)

    @property
    def main_program(self) -> Recording:
        """This rank's recording of the present mode's step: print it, ``draw`` it."""
        return programs.main_program(self, self.mode)

    @property
    def serial_main_program(self) -> Recording:
        """The recording of the same step on one card."""
        return programs.serial_program(self, self.mode)

    @property
    def startup_program(self) -> programs.Startup:
        """What this rank holds before the first step: print it, ``draw`` it."""
        return programs.startup(self, serial=False)

    @property
    def serial_startup_program(self) -> programs.Startup:
        """What one card holds before the first step."""
        return programs.startup(self, serial=True)

    def __repr__(self) -> str:
        return f"Engine({type(self.model).__name__}, {self.strategy})"


def whole(value: Any) -> Any:
    """Each distributed tensor of a nest as it is on one card."""
    return tree_map(lambda x: unshard(x).detach() if isinstance(x, DistTensor) else x, value)
