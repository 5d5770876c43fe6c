"""Engine with a model that is cut into stages: fit, validation, prediction and checkpoints are one card's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_programs import Samples
from torch import nn

import onecard as oc
from onecard.testing import run_ranks


def _engine(pipeline: bool) -> oc.Engine:
    torch.manual_seed(0)
    width = Samples(1)[0][0].shape[0]
    layers = [nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers)
    strategy = {"pipeline": {"enable": True, "accumulate_steps": 4}} if pipeline else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return oc.Engine(model, lambda out, y: F.cross_entropy(out, y.flatten() % 3), optimizer, None, strategy)


def _fitted(pipeline: bool, folder: str = "") -> Any:
    """Losses, the last one of validation, and predictions; stopped after a pass and resumed, where there is a folder."""
    engine, data = _engine(pipeline), Samples(20)
    how: Any = {"batch_size": 8, "shuffle": False, "drop_last": True, "verbose": 0, "save_dir": folder or None}
    first = []
    if folder:
        first = engine.fit(data, epochs=1, **how).losses
        engine = _engine(pipeline)
    losses = first + engine.fit(data, epochs=2, valid_data=data, **how).losses
    found = engine.evaluate(data, batch_size=8, verbose=0)["loss"]
    predicted = torch.cat([torch.as_tensor(p) for p in engine.predict(data, batch_size=8, verbose=0)])
    return losses[-4:], found, predicted.tolist()


@pytest.mark.proof
def test_fit_stopped_and_resumed_as_on_one_card(tmp_path: Path) -> None:
    wanted = _fitted(False)
    for found in run_ranks(_fitted, 2, True, str(tmp_path / "fit"), timeout=300.0):
        for one, other in zip(wanted, found, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)


def _short_last(stages: int) -> Any:
    """Losses, accuracies and predictions where the last batch has three rows, then one: fewer than ranks divide evenly."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    model, found = nn.Sequential(*layers), []
    strategy = {"pipeline": {"enable": True, "degree": stages, "accumulate_steps": 2}} if stages > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = oc.Engine(model, nn.CrossEntropyLoss(), optimizer, [oc.Accuracy()], strategy)
    data = [(torch.randn(6), i % 3) for i in range(19)]
    for count in (19, 17):
        how: Any = {"batch_size": 8, "verbose": 0}
        found += engine.fit(data[:count], epochs=2, shuffle=False, **how).losses
        found += engine.evaluate(data[:count], **how).values()
        found += torch.cat([torch.as_tensor(p) for p in engine.predict(data[:count], **how)]).flatten().tolist()
    return found


@pytest.mark.share(1)
def test_a_last_batch_that_ranks_do_not_divide() -> None:
    wanted = torch.tensor(_short_last(1))
    for found in run_ranks(_short_last, 4, 2, timeout=120.0):
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)


def _of_classes(pipeline: bool) -> list[float]:
    """Losses of training and of what follows, of a loss that weighs classes in two ways."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)
    data = [(torch.randn(6), i % 3) for i in range(24)]
    model = nn.Sequential(*layers)
    strategy = {"pipeline": {"enable": True, "accumulate_steps": 2}} if pipeline else None
    engine = oc.Engine(model, loss, torch.optim.SGD(model.parameters(), 0.1), None, strategy)
    with warnings.catch_warnings(action="ignore"):  # the price leaves the second rank the loss alone
        losses = engine.fit(data, batch_size=8, epochs=2, shuffle=False, verbose=0).losses
        return [*losses, engine.evaluate(data, batch_size=8, verbose=0)["loss"]]


def test_evaluation_takes_the_weights_of_a_loss_where_training_does() -> None:
    wanted = torch.tensor(_of_classes(False))
    for found in run_ranks(_of_classes, 2, True):
        assert torch.allclose(torch.tensor(found), wanted, rtol=1e-5)


def _program(recording: Any) -> tuple[list[str], float]:
    """What a recording does, and what it costs."""
    nodes = [getattr(n.target, "__name__", None) or str(n.target) for n in recording.graph.nodes]
    return nodes, recording.cost().seconds


def _programs(run: bool) -> list[Any]:
    """This rank's programs of training and evaluation before the first step, and after some."""
    engine = _engine(True)
    width = Samples(1)[0][0].shape[0]
    engine.prepare(oc.InputSpec([8, width], "float32", "x"), oc.InputSpec([8], "int64", "y"), mode="train")
    held = str(engine.startup_program)
    found = [_program(engine.main_program), engine.cost("eval").seconds]
    assert engine.cost("train").seconds == found[0][1] and len(engine.serial_main_program.graph.nodes) > 20
    assert str(engine.startup_program) == held
    if run:
        x, y = torch.ones(8, width), torch.zeros(8, dtype=torch.int64)
        for mode in ("train", "train", "train", "eval"):
            engine.run((x, y), mode=mode)
        engine.to_mode("train")
        assert [_program(engine.main_program), engine.cost("eval").seconds] == found
    return found


def _explained() -> list[Any]:
    """What is said of the messages of the first step, and of a later one."""
    engine, width = _engine(True), Samples(1)[0][0].shape[0]
    engine.prepare(oc.InputSpec([8, width], "float32", "x"), oc.InputSpec([8], "int64", "y"), mode="train")
    said = []
    for _ in range(3):
        with oc.explain() as report:
            engine.run((torch.ones(8, width), torch.zeros(8, dtype=torch.int64)))
        assert all("test_engine_cut.py" in m.source and m.operator == "stages" for m in report.messages)
        said.append([(m.step.kind, m.shape, m.step.bytes) for m in report.messages])
    return said


@pytest.mark.proof
def test_the_first_step_is_explained_as_the_others() -> None:
    found = run_ranks(_explained, 2, timeout=120.0)
    assert all(first == second == third for first, second, third in found) and any(first for first, *_ in found)


def _to_static(steps: int) -> Any:
    """Of ``to_static`` alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(4, at=["2"]))
    given = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
    for _ in range(steps):
        run(*given)
    return _program(run.recordings[0] if run.recordings else run.recording_of(*given))


def _both() -> list[Any]:
    return [_programs(True), _to_static(3)]


@pytest.mark.proof
def test_programs_before_the_first_step_are_those_that_run() -> None:
    found = run_ranks(_both, 2, timeout=120.0)
    for rank in range(2):
        with oc.pretend(2, rank):
            assert _programs(False) == found[rank][0]
        with oc.pretend(2, rank, fake=True):
            assert _to_static(1) == found[rank][1]


def _without(kind: str, staged: bool) -> list[float]:
    """Losses of a model of which a stage has no parameters, or none that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Tanh())
    if kind == "frozen":
        model[0].requires_grad_(False)
    stages = oc.Stages(4, at=("3",) if kind == "none" else ("1",)) if staged else None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=stages) if stages is not None else step
    return [float(run(torch.full((8, 6), 0.1 * i), torch.ones(8, 3))) for i in range(1, 6)]


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["none", "frozen"])
def test_a_stage_that_has_nothing_to_train(kind: str) -> None:
    """It has no states that its first step makes: all ranks record the second step all the same."""
    wanted = _without(kind, False)
    for found in run_ranks(_without, 2, kind, True, timeout=60.0):
        assert found == pytest.approx(wanted, rel=1e-5)


def _weighted(ranks: int) -> list[float]:
    """A small model, all of it on the first stage, and a loss that is divided by weights; the last batch is short."""
    torch.manual_seed(0)
    model, strategy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), oc.Strategy()
    if ranks > 1:
        strategy.pipeline.enable, strategy.pipeline.degree, strategy.pipeline.accumulate_steps = True, 2, 2

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = 1.0 + (y == 1)
        return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    engine = oc.Engine(model, loss, optimizer, strategy=strategy)
    engine.prepare(oc.InputSpec([None, 4], "float32", "x"), oc.InputSpec([None], "int64", "y"), mode="train")
    x, y = torch.linspace(-1, 1, 88).reshape(22, 4).sin(), torch.arange(22) % 3
    batches = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    return [float(engine.run(batch, mode="train")["loss"]) for batch in batches]


@pytest.mark.proof
def test_a_loss_over_all_ranks_and_a_short_last_batch() -> None:
    """What ranks beside the pipeline sum is made and summed on one stage; rows that do not divide are one microbatch."""
    wanted = _weighted(1)
    for found in run_ranks(_quietly, 4, timeout=100.0):
        assert found == pytest.approx(wanted, rel=1e-5)


def _quietly() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stages without parameters
        return _weighted(4)


def _deferred(pipeline: bool) -> list[float]:
    """Losses of a model that was built without memory."""
    torch.manual_seed(0)
    with oc.deferred_init():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    strategy = {"pipeline": {"enable": True, "accumulate_steps": 4}} if pipeline else None
    engine = oc.Engine(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.01), strategy=strategy)
    engine.prepare(oc.InputSpec([8, 6], "float32", "x"), oc.InputSpec([8, 6], "float32", "y"), mode="train")
    x = torch.linspace(-1, 1, 48).reshape(8, 6).sin()
    return [float(engine.run((x, x.cos()))["loss"]) for _ in range(3)]


@pytest.mark.proof
def test_a_deferred_model() -> None:
    """It has values before its stages run, though no other axis lays it out."""
    wanted = run_ranks(_deferred, 2, False)[0]
    for found in run_ranks(_deferred, 2, True, timeout=100.0):
        assert found == pytest.approx(wanted, rel=1e-5)
