"""fit, evaluate and predict: an Engine's passes over data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from onecard import checkpoint
from onecard.checkpoint.writer.stopping import preemption_noted
from onecard.engine import saved
from onecard.engine.loaders import EngineLoader, loader_of, no_batches
from onecard.engine.progress import Callbacks, Shown
from onecard.errors import EngineError


@dataclass
class History:
    """What ``fit`` has seen: the loss of each step, and of each epoch the means and metrics; after a restart, of all of them."""

    losses: list[float] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, name: str) -> list[Any]:
        """A value of each epoch, by its name: "loss", "acc_top1", "val_loss"."""
        return [epoch[name] for epoch in self.epochs if name in epoch]


@dataclass
class Mean:
    """A loss over a pass: each sample counts alike, however long its batch was."""

    total: float = 0.0
    rows: int = 0

    def add(self, loss: float, rows: int) -> None:
        """Count a batch."""
        self.total, self.rows = self.total + float(loss) * rows, self.rows + rows

    @property
    def value(self) -> float:
        """So far."""
        return self.total / max(self.rows, 1)


def fit(
    engine: Any,
    train_data: Any,
    valid_data: Any = None,
    batch_size: int = 1,
    epochs: int = 1,
    *,
    steps_per_epoch: int | None = None,
    log_freq: int = 10,
    valid_freq: int = 1,
    valid_steps: int | None = None,
    save_dir: Any = None,
    save_freq: int = 1,
    save_steps: int | None = None,
    keep: int = 2,
    resume: bool = True,
    callbacks: Sequence[Any] = (),
    shuffle: bool = False,
    drop_last: bool = False,
    collate_fn: Any = None,
    num_workers: int = 0,
    sample_split: int = 0,
    train_sample_split: int = 0,
    valid_sample_split: int = 0,
    verbose: int = 1,
    nvprof_range: Any = None,
) -> History:
    """Train over a dataset, and go on where an earlier call was stopped.

    Args:
        train_data, valid_data: datasets, DataLoaders, or iterables of whole batches.
        batch_size: samples of the whole batch, over all ranks.
        steps_per_epoch, valid_steps: at most so many batches of a pass.
        log_freq: steps between two lines. verbose: 0 nothing, 1 a bar on a terminal, else lines, 2 lines.
        valid_freq: epochs between two validations.
        save_dir: where checkpoints go: after each ``save_freq`` epochs, each ``save_steps`` steps, and at a SIGTERM, which ends
            it; the newest ``keep`` stay.
        sample_split: how many entries of a batch are inputs; the rest are labels. All but the last, if left out.
        train_sample_split, valid_sample_split: the same of one of the two datasets.
        resume: with a checkpoint in ``save_dir``, go on there: model, optimizers, position in the data, random numbers, history;
            on any number of ranks. False: refuse a folder with checkpoints.
        callbacks: objects with some of ``on_train_begin(logs)``, ``on_epoch_begin(epoch, logs)``,
            ``on_train_batch_begin(step, logs)``, ``on_train_batch_end(step, logs)``, ``on_eval_begin(logs)``,
            ``on_eval_end(logs)``, ``on_epoch_end(epoch, logs)``, ``on_train_end(logs)``, ``set_model(engine)``; or functions of
            a step and its logs.
            ``engine.stop_training = True`` ends it, on all ranks alike.

    Returns:
        The ``History``.

    Raises:
        EngineError: no batch; a dataset shorter than a batch; checkpoints in the way.
    """
    _check_counts(epochs=epochs, log_freq=log_freq, valid_freq=valid_freq, save_freq=save_freq)
    if nvprof_range not in (None, [-1, -1], (-1, -1)):
        raise EngineError(
            f"fit(nvprof_range={nvprof_range}): steps are profiled by torch's profiler: a callback that calls the step() of a "
            "torch.profiler.profile(...) in on_train_batch_end"
        )
    split = train_sample_split or sample_split
    engine.look_at(train_data, batch_size, collate_fn, split)
    engine.prepare(mode="train", sample_split=split)
    engine.expect(batch_size)
    options = {"collate_fn": collate_fn, "num_workers": num_workers}
    more = {"shuffle": shuffle or None, "drop_last": drop_last}
    loader = loader_of(train_data, engine.place(), batch_size, True, **options, **more)
    run = _Run(engine, loader, None if save_dir is None else Path(save_dir), keep, Callbacks(callbacks, engine))
    run.begin(resume)
    engine.stop_training = False
    length = _length(loader, steps_per_epoch)
    with preemption_noted() if run.folder else nullcontext(), Shown(verbose, log_freq, length, epochs) as shown:
        run.tell("on_train_begin", {})
        while run.epoch < epochs and not engine.stop_training and not run.stopped:
            logs = _epoch(run, steps_per_epoch, save_steps, shown)
            if run.stopped:
                shown.say(f"fit ends after step {run.step}: SIGTERM. What it has is in {run.folder}")
                break
            if valid_data is not None and (run.epoch + 1) % valid_freq == 0:
                its = {"sample_split": valid_sample_split or split}
                logs |= _validated(run, valid_data, batch_size, valid_steps, options | its)
            _schedule(engine, "epoch", logs)
            run.end_epoch(logs)
            shown.epoch(run.epoch, logs)
            run.tell("on_epoch_end", run.epoch - 1, logs)
            due = run.epoch % save_freq == 0 or run.epoch == epochs or engine.stop_training
            if due and not run.left:  # of a pass that was left there is a checkpoint, with its place
                run.save()
        run.tell("on_train_end", run.history.epochs[-1] if run.history.epochs else {})
        run.finish()
    return run.history


def evaluate(
    engine: Any,
    valid_data: Any,
    batch_size: int = 1,
    *,
    steps: int | None = None,
    callbacks: Any = (),
    collate_fn: Any = None,
    num_workers: int = 0,
    sample_split: int = 0,
    valid_sample_split: int = 0,
    verbose: int = 1,
) -> dict[str, float]:
    """The loss and the metrics of a pass. The loss is the mean of the batches', each weighed by its samples.

    Args:
        valid_data, batch_size, collate_fn, num_workers, callbacks, verbose: as of ``fit``.
        sample_split: as of ``fit``, for this pass; ``valid_sample_split`` is another name of it.
        steps: at most so many batches.

    Raises:
        EngineError: no batch.
    """
    told = callbacks if isinstance(callbacks, Callbacks) else Callbacks(callbacks, engine)
    before = engine.mode, engine._split
    engine.prepare(mode="eval", sample_split=valid_sample_split or sample_split)
    loader = loader_of(
        valid_data, engine.place(), batch_size, False, collate_fn=collate_fn, num_workers=num_workers, drop_last=False
    )
    mean = Mean()
    for metric in engine.metrics:
        metric.reset()
    told("on_eval_begin", {})
    for batch in islice(loader, steps):
        found, rows = engine.step(batch, "eval")
        mean.add(found["loss"], rows)
    engine.mode, engine._split = before
    if not mean.rows:
        raise no_batches("evaluate", 0)
    logs = {"loss": mean.value} | _values(engine)
    told("on_eval_end", logs)
    if verbose:
        Shown.say("evaluated: " + Shown.words(logs))
    return logs


def predict(
    engine: Any,
    test_data: Any,
    batch_size: int = 1,
    *,
    steps: int | None = None,
    collate_fn: Any = None,
    num_workers: int = 0,
    sample_split: int = 0,
    test_sample_split: int = 0,
    verbose: int = 1,
) -> list[Any]:
    """The model's outputs for each batch, whole on every rank. Labels in the data are left alone.

    Args:
        test_data, batch_size, collate_fn, num_workers, verbose: as of ``fit``. steps: at most so many batches.
        sample_split: as of ``fit``, for this pass; ``test_sample_split`` is another name of it.
    """
    before = engine.mode, engine._split
    engine.prepare(mode="predict", sample_split=test_sample_split or sample_split)
    loader = loader_of(
        test_data, engine.place(), batch_size, False, collate_fn=collate_fn, num_workers=num_workers, drop_last=False
    )
    found = [engine.step(batch, "predict")[0]["outputs"] for batch in islice(loader, steps)]
    engine.mode, engine._split = before
    if verbose:
        Shown.say(f"predicted {len(found)} batch(es)")
    return found


class _Run:
    """One ``fit``: what is counted, and what of it a checkpoint holds."""

    def __init__(self, engine: Any, loader: Any, folder: Path | None, keep: int, tell: Callbacks) -> None:
        self.engine, self.loader, self.folder, self.keep, self.tell = engine, loader, folder, keep, tell
        self.epoch = self.step = self.in_epoch = 0
        self.mean, self.history = Mean(), History()
        self.stopped = self.left = False
        self.saving: Any = None

    def begin(self, resume: bool) -> None:
        """Go on at the newest checkpoint, if there is one."""
        if self.folder is None or checkpoint.latest(self.folder) is None:
            return
        if not resume:
            raise EngineError(
                f"fit(resume=False): {self.folder} has checkpoints: give another save_dir to begin anew, or resume=True to go on"
            )
        state = self._state()
        checkpoint.load(self.folder, state)
        counted = state["fit"]
        self.epoch, self.step, self.in_epoch = (counted[name] for name in ("epoch", "step", "in_epoch"))
        self.mean = Mean(counted["total"], counted["rows"])
        self.history = History(counted["losses"], counted["epochs"])
        Shown.say(f"fit goes on after step {self.step} (epoch {self.epoch + 1})")

    def _state(self) -> dict[str, Any]:
        counted = {
            "epoch": self.epoch, "step": self.step, "in_epoch": self.in_epoch, "total": self.mean.total, "rows": self.mean.rows,
            "losses": self.history.losses, "epochs": self.history.epochs,
        }  # fmt: skip
        kept = {str(i): m.metric for i, m in enumerate(self.engine.metrics) if hasattr(m.metric, "state_dict")}
        return saved.state_of(self.engine, True) | {"loader": self.loader, "fit": counted, "metrics": kept}

    def save(self, wait: bool = False) -> None:
        """A checkpoint after this step."""
        if self.folder is not None:
            self.saving = checkpoint.save(self._state(), self.folder, self.step, keep=self.keep, wait=wait)

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """A pass is over: the next one begins anew."""
        self.history.epochs.append({"epoch": self.epoch, **logs})
        self.epoch, self.in_epoch, self.mean = self.epoch + 1, 0, Mean()
        for metric in self.engine.metrics:
            metric.reset()
        if isinstance(self.loader, EngineLoader):
            self.loader.loader.position.ended = True
        else:
            self.loader.read = 0

    def finish(self) -> None:
        """The last checkpoint is complete."""
        if self.saving is not None:
            self.saving.wait()


def _epoch(run: _Run, most: int | None, save_steps: int | None, shown: Shown) -> dict[str, Any]:
    """A pass, or the rest of one."""
    engine = run.engine
    if not run.in_epoch:
        for metric in engine.metrics:
            metric.reset()
    run.tell("on_epoch_begin", run.epoch, {})
    for batch in _rest(run, most):
        run.tell("on_train_batch_begin", run.step, {})
        found, rows = engine.step(batch, "train")
        loss = float(found["loss"])
        run.mean.add(loss, rows)
        run.history.losses.append(loss)
        run.step, run.in_epoch = run.step + 1, run.in_epoch + 1
        _schedule(engine, "step", {"loss": loss})
        logs = {"loss": loss}
        if run.tell.batches or shown.due(run.in_epoch):
            logs |= _values(engine)
        shown.step(run.epoch, run.in_epoch, logs)
        run.tell("on_train_batch_end", run.step - 1, logs)
        run.stopped = run.folder is not None and checkpoint.preempted()
        run.left = engine.stop_training
        if run.stopped or run.left or (save_steps and run.step % save_steps == 0):
            run.save(wait=run.stopped)
        if run.stopped or run.left:
            break
    if not run.in_epoch:
        raise no_batches("train", run.epoch)
    return {"loss": run.mean.value} | _values(engine)


def _rest(run: _Run, most: int | None) -> Iterator[Any]:
    left = None if most is None else max(most - run.in_epoch, 0)
    return islice(run.loader, left)


def _validated(run: _Run, data: Any, batch_size: int, steps: int | None, options: dict[str, Any]) -> dict[str, Any]:
    found = evaluate(run.engine, data, batch_size, steps=steps, callbacks=run.tell, verbose=0, **options)
    return {f"val_{name}": value for name, value in found.items()}


def _values(engine: Any) -> dict[str, Any]:
    return {name: value for metric in engine.metrics for name, value in metric.values().items()}


def _schedule(engine: Any, after: str, logs: dict[str, Any]) -> None:
    """Step the schedulers whose turn it is."""
    given = engine.scheduler
    for scheduler in given if isinstance(given, list | tuple) else [given] if given is not None else []:
        if isinstance(scheduler, ReduceLROnPlateau):
            if after == "epoch":
                scheduler.step(logs.get("val_loss", logs["loss"]))
        elif after == engine.scheduler_each:
            scheduler.step()


def _length(loader: Any, most: int | None) -> int | None:
    try:
        length = len(loader)
    except TypeError:
        return most
    return length if most is None else min(most, length)


def _check_counts(**given: Any) -> None:
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise EngineError(f"fit({name}={value!r}): want a whole number, 1 or more")
