"""fit: passes, validation, callbacks, schedulers; killed and started again, on as many ranks and on others."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import engine_programs as programs
import pytest
import torch
from torch import nn

import onecard as oc
from onecard.checkpoint import CheckpointWarning
from onecard.errors import EngineError
from onecard.testing import RankError, run_ranks

COUNT, BATCH, EPOCHS = 30, 8, 2  # passes of 8, 8, 8 and 6


class Dropping(nn.Module):
    """With what draws random numbers, and what counts batches."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(programs.WIDTH, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(8, programs.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def labels_flat(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, label.squeeze(1))


def fit(
    folder: Path | None, die_at: int, dropout: float = 0.2, **options: Any
) -> tuple[list[float], list[Any], dict[str, Any]]:
    """A fit that begins with other numbers each time, unless it goes on where it was; a rank kills itself after a step."""
    # A save that the kill cut off is skipped with this warning: whether one was under way depends on the machine.
    warnings.simplefilter("ignore", CheckpointWarning)
    torch.manual_seed(5)
    model = Dropping(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = oc.Engine(
        model, labels_flat, optimizer, oc.Accuracy(), oc.Strategy(sharding={"enable": oc.get_world_size() > 1}, seed=11),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), clip_grad_norm=1.0,
    )  # fmt: skip

    def die(step: int, logs: Any) -> None:
        if step == die_at and oc.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    history = engine.fit(
        programs.Samples(COUNT), programs.Samples(11), BATCH, EPOCHS, shuffle=True, save_dir=folder, save_steps=2, verbose=0,
        callbacks=[die], **options,
    )  # fmt: skip
    return history.losses, history.epochs, {name: oc.unshard(p).detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Nobody stops these: on two ranks with dropout and without, on one without."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        (ranks, dropout): run_ranks(fit, ranks, folder / f"{ranks}{dropout}", -1, dropout)[0]
        for ranks, dropout in ((2, 0.2), (1, 0.0))
    }


@pytest.mark.proof
def test_a_killed_fit_goes_on_as_if_nobody_had_killed_it(tmp_path: Path, whole: Any) -> None:
    """Within a pass, and right after one; bit for bit on as many ranks."""
    for die_at in (2, 4):
        with pytest.raises(RankError):
            run_ranks(fit, 2, tmp_path, die_at)
    losses, epochs, parameters = run_ranks(fit, 2, tmp_path, -1)[0]
    assert len(losses) == 4 * EPOCHS and losses == whole[2, 0.2][0]
    assert epochs == whole[2, 0.2][1] and sorted(epochs[0]) == ["acc", "epoch", "loss", "val_acc", "val_loss"]
    assert all(torch.equal(p, whole[2, 0.2][2][name]) for name, p in parameters.items())


@pytest.mark.proof
def test_on_another_number_of_ranks(tmp_path: Path, whole: Any) -> None:
    with pytest.raises(RankError):
        run_ranks(fit, 2, tmp_path, 6, 0.0)
    losses, epochs, _ = run_ranks(fit, 1, tmp_path, -1, 0.0)[0]
    assert losses == pytest.approx(whole[1, 0.0][0], rel=1e-5)
    assert [epoch["acc"] for epoch in epochs] == [epoch["acc"] for epoch in whole[1, 0.0][1]]


class Watching:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def set_model(self, engine: oc.Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name.removeprefix("on_"), *args[:-1]))

    def on_train_batch_end(self, step: int, logs: dict[str, Any]) -> None:
        self.told.append(("train_batch_end", step, sorted(logs)))
        self.engine.stop_training = step == 4

    def __dir__(self) -> list[str]:
        return ["on_epoch_end"]


def simple(**options: Any) -> tuple[oc.Engine, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Dropping(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {name: make(optimizer) if name == "scheduler" else make for name, make in options.items()}
    return oc.Engine(model, labels_flat, optimizer, oc.Accuracy(), **given), optimizer


def _left(folder: Path | None, leave_at: int) -> Any:
    """Losses and weights of a fit whose callback ends it after a step."""
    torch.manual_seed(5)
    model = Dropping(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = oc.Engine(model, labels_flat, optimizer, scheduler=scheduler, scheduler_each="epoch")

    def leave(step: int, logs: Any) -> None:
        engine.stop_training = step == leave_at

    how: Any = {"shuffle": True, "save_dir": folder, "verbose": 0, "callbacks": [leave]}
    oc.manual_seed(3)
    losses = engine.fit(programs.Samples(COUNT), programs.Samples(5), BATCH, 3, **how).losses
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.share(1)
@pytest.mark.parametrize("leave_at", [5, 7])  # in the midst of a pass, and with its last batch
def test_a_fit_that_a_callback_ends_goes_on_where_it_was(tmp_path: Path, leave_at: int) -> None:
    wanted, weights = _left(None, -1)
    assert len(_left(tmp_path / "fit", leave_at)[0]) == leave_at + 1
    losses, found = _left(tmp_path / "fit", -1)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert all(torch.allclose(one, other) for one, other in zip(found, weights, strict=True))


def test_passes_and_whom_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = simple()
    watching, steps = Watching(), []
    history = engine.fit(
        programs.Samples(COUNT), programs.Samples(5), BATCH, 3, callbacks=[watching, lambda step, logs: steps.append(step)],
        valid_freq=2, log_freq=3,
    )  # fmt: skip
    step = [("train_batch_begin", 0), ("train_batch_end", 0, ["acc", "loss"])]
    assert watching.told[:4] == [("train_begin",), ("epoch_begin", 0), *step] and steps == [0, 1, 2, 3, 4]
    assert watching.told[-5:] == [
        ("train_batch_end", 4, ["acc", "loss"]), ("eval_begin",), ("eval_end",), ("epoch_end", 1), ("train_end",),
    ]  # fmt: skip
    assert len(history.losses) == 5 and len(history["loss"]) == 2 and len(history["val_acc"]) == 1
    assert history["loss"][0] == pytest.approx(
        sum(x * n for x, n in zip(history.losses, (8, 8, 8, 6), strict=False)) / 30
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 1/3 step 3/4", "epoch 1/3", "epoch 2/3"]
    assert "val_acc" in lines[-1] and "loss" in lines[0]
    with pytest.raises(EngineError, match="has no method such as on_epoch_end"):
        engine.fit(programs.Samples(COUNT), callbacks=[object()])


def test_learning_rates() -> None:
    rates = torch.optim.lr_scheduler
    for options, rate in (
        ({"scheduler": lambda o: rates.StepLR(o, 3)}, 0.01),
        ({"scheduler": lambda o: rates.StepLR(o, 1), "scheduler_each": "epoch"}, 0.01),
        ({"scheduler": lambda o: rates.ReduceLROnPlateau(o, patience=0, threshold=9.0)}, 0.01),
    ):
        engine, optimizer = simple(**options)
        engine.fit(programs.Samples(COUNT), None, BATCH, 1, verbose=0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_other_data(tmp_path: Path) -> None:
    """Loaders, iterables, steps of a pass; what is read of them goes on, too."""
    whole = simple()[0].fit(programs.Samples(COUNT), None, BATCH, 2, verbose=0).losses
    loader = torch.utils.data.DataLoader(programs.Samples(COUNT), BATCH)
    assert simple()[0].fit(loader, epochs=2, verbose=0).losses == whole
    engine, _ = simple()
    assert engine.fit(engine.dataloader(programs.Samples(COUNT), BATCH), epochs=2, verbose=0).losses == whole

    class Batches:
        def __iter__(self) -> Any:
            return iter(programs.batches(COUNT))

    for name, given in (("batches", Batches()), ("samples", programs.Samples(COUNT))):
        for epochs in (1, 2):
            parts = (
                simple()[0]
                .fit(given, None, BATCH, epochs, save_dir=tmp_path / name, steps_per_epoch=3, verbose=0)
                .losses
            )
        assert parts == simple()[0].fit(given, None, BATCH, 2, steps_per_epoch=3, verbose=0).losses and len(parts) == 6
    divided = torch.utils.data.DistributedSampler(programs.Samples(COUNT), 2, 0)  # type: ignore[var-annotated]
    with pytest.raises(EngineError, match="DistributedSampler gives each rank its own samples"):
        engine.fit(torch.utils.data.DataLoader(programs.Samples(COUNT), BATCH, sampler=divided))
    with oc.deferred_init():
        model = Dropping(0.0)
    made = oc.Engine(model, labels_flat, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = made.fit(programs.Samples(COUNT), None, BATCH, 2, verbose=0).losses
    assert len(losses) == len(whole) and sum(losses[4:]) < sum(losses[:4])  # its numbers are drawn otherwise


def test_evaluation_is_that_of_samples() -> None:
    engine, _ = simple()
    found = engine.evaluate(programs.Samples(COUNT), BATCH, verbose=0)
    x, y = next(iter(programs.batches(COUNT, COUNT)))
    out = engine.model.eval()(x)
    assert found["loss"] == pytest.approx(labels_flat(out, y).item(), rel=1e-6)
    assert found["acc"] == pytest.approx((out.argmax(1, keepdim=True) == y).float().mean().item())


def test_a_fit_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = fit(tmp_path, -1, 0.0)
    assert fit(tmp_path, 0, 0.0)[0] == first[0]  # nothing is left, so that nobody is killed
    with pytest.raises(EngineError, match=r"fit\(resume=False\): .* has checkpoints"):
        fit(tmp_path, -1, 0.0, resume=False)


def test_a_pass_that_is_taken_up_at_its_shorter_last_batch(tmp_path: Path) -> None:
    """In microbatches, the first batch that an engine meets may be one that they do not divide."""
    generator = torch.Generator().manual_seed(2)
    data = [(torch.randn(8, generator=generator), torch.tensor(i % 6)) for i in range(27)]

    def fit(folder: Path, leave_at: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 6)
        strategy = oc.Strategy()
        strategy.gradient_merge.enable, strategy.gradient_merge.k_steps = True, 2
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = oc.Engine(model, torch.nn.CrossEntropyLoss(), optimizer, strategy=strategy)

        def leave(step: int, logs: Any) -> None:
            engine.stop_training = step == leave_at

        return engine.fit(data, batch_size=8, epochs=2, verbose=0, save_dir=folder, callbacks=[leave]).losses

    wanted = fit(tmp_path / "whole", -1)
    assert len(fit(tmp_path / "left", 2)) == 3
    assert fit(tmp_path / "left", -1) == pytest.approx(wanted, rel=1e-5)


def _preempted(folder: str) -> Any:
    """Two fits, the first of which a SIGTERM ends; then one that a SIGTERM reaches at its end, behind its last step."""
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("the program's own"))
    own = signal.getsignal(signal.SIGTERM)

    class Sends:
        def on_train_batch_end(self, step: int, logs: Any) -> None:
            if step == 2 and oc.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_end(self, logs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    data = [(torch.full((3,), i / 9), torch.tensor(i % 2)) for i in range(12)]

    def fitted(place: str | None, **sends: Any) -> int:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = oc.Engine(model, nn.CrossEntropyLoss(), optimizer)
        callbacks = [type("Watch", (), {name: getattr(Sends, name) for name in sends})()] if sends else []
        given = None if place is None else f"{folder}/{place}"
        return len(engine.fit(data, batch_size=2, verbose=0, callbacks=callbacks, save_dir=given).losses)

    late = fitted("late", on_train_end=True), heard.copy()
    heard.clear()
    return (
        late,
        fitted("first", on_train_batch_end=True),
        fitted("first"),
        heard,
        signal.getsignal(signal.SIGTERM) is own,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sigterm_is_noted_within_a_fit_alone(ranks, tmp_path, capfd):
    for late, ended, again, heard, own in run_ranks(_preempted, ranks, str(tmp_path)):
        assert late == (6, ["the program's own"])  # nobody asks any more: it is what it is to the program
        assert (ended, again, heard, own) == (3, 4, [], True)  # the job is still asked to end
    said = capfd.readouterr().out
    assert "fit ends after step 3: SIGTERM. What it has is in" in said and "fit ends after step 4: SIGTERM" in said


class Weighed(nn.Module):
    """A model of a sample's first two entries, or of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(programs.WIDTH, 1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        made = self.layer(x)
        return made if weight is None else made * weight


def gap(out: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
    """A loss of one label, or of two."""
    return sum((out - label).square().mean() for label in labels) / len(labels)


def test_where_inputs_end_is_said_of_each_dataset() -> None:
    torch.manual_seed(0)
    x, weight, label, more = (torch.randn(8, n) for n in (programs.WIDTH, 1, 1, 1))
    trained, valid = torch.utils.data.TensorDataset(x, weight, label, more), torch.utils.data.TensorDataset(x, label)
    model = Weighed()
    engine = oc.Engine(model, gap, torch.optim.SGD(model.parameters(), 0.1))
    alone = Weighed()
    alone.load_state_dict(model.state_dict())
    seen = engine.fit(trained, valid, 8, 2, train_sample_split=2, valid_sample_split=1, verbose=0)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for epoch in range(2):
        loss = gap(alone(x, weight), label, more)
        torch.testing.assert_close(torch.tensor(seen["loss"][epoch]).float(), loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.tensor(seen["val_loss"][epoch]).float(), gap(alone(x), label).detach())
    found = engine.evaluate(valid, 8, valid_sample_split=1, verbose=0)["loss"]
    torch.testing.assert_close(torch.tensor(found).float(), gap(alone(x), label).detach())
    (out,) = engine.predict(trained, 8, test_sample_split=1, verbose=0)
    torch.testing.assert_close(out, alone(x).detach())
    with pytest.raises(EngineError, match=r"nvprof_range=\[1, 3\].*torch\.profiler"):
        engine.fit(trained, batch_size=8, nvprof_range=[1, 3])
