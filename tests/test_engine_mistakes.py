"""Mistakes with an Engine under a pipeline: one error each, on all ranks, with the field and what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.errors import OnecardError
from onecard.testing import run_ranks

DATA = [(torch.full((4,), float(i)), i % 3) for i in range(16)]
LOSS = nn.CrossEntropyLoss(reduction="none")


class Metric:
    """One of whose methods raises, at its n-th call."""

    def __init__(self, fails: str, at: int = 1) -> None:
        self.fails, self.at = fails, at

    def _call(self, method: str) -> float:
        if method == self.fails:  # what the step reads of it makes another recording
            self.at -= 1
            if not self.at:
                raise ValueError("of mine")
        return 0.0

    def compute(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self._call("compute")
        return outputs.sum()

    def update(self, *_: Any) -> None:
        self._call("update")

    def accumulate(self) -> float:
        return self._call("accumulate")

    def reset(self) -> None:
        """Nothing is kept."""

    def name(self) -> str:
        return "mine"


def engine(loss: Any = None, metrics: Any = None, **pipeline: Any) -> oc.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    strategy = {"pipeline": {"enable": True, "accumulate_steps": 4, **pipeline}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return oc.Engine(model, loss or nn.CrossEntropyLoss(), optimizer, metrics, strategy)


def fit(of: oc.Engine, samples: int = 16, batch_size: int = 8) -> Any:
    return of.fit(DATA[:samples], batch_size=batch_size, verbose=0)


def of_dist_model() -> Any:
    model = nn.Linear(4, 3)
    strategy = oc.Strategy({"pipeline": {"enable": True}})
    made = oc.to_static(model, None, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    made.train()
    return made(torch.ones(8, 4), torch.arange(8) % 3)


def contrast(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of rows with each other."""
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


BATCH = torch.ones(8, 4), torch.arange(8) % 3
TABLE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "several losses": (lambda: fit(engine(LOSS)), ("the loss is a tensor of shape [8], not one number", "'mean'")),
    "several losses, evaluated": (
        lambda: engine(LOSS).evaluate(DATA, batch_size=8, verbose=0),
        ("shape [8], not one number",),
    ),
    "of a DistModel": (of_dist_model, ("the loss is a tensor of shape [8], not one number",)),
    "a short dataset": (
        lambda: fit(engine(), 3),
        ("batch_size=8: the dataset has 3 sample(s)", "batch_size=3 or less"),
    ),
    "a loader of it": (
        lambda: engine().dataloader(DATA[:3], batch_size=8),
        ("has 3 sample(s)", "batch_size=3 or less"),
    ),
    "another model's optimizer": (
        lambda: fit(oc.Engine(nn.Linear(4, 3), nn.CrossEntropyLoss(), torch.optim.SGD(nn.Linear(4, 3).parameters()))),
        ("SGD has no parameter of the model", "torch.optim.AdamW(model.parameters())"),
    ),
    "no samples": (lambda: engine().evaluate([], batch_size=8, verbose=0), ("the dataset has no samples",)),
    "rows that do not divide": (lambda: fit(engine(), 12, 6), ("6 rows cannot be cut in 4 microbatches", "4 divides")),
    "a metric's update": (
        lambda: fit(engine(metrics=Metric("update", 2))),
        ("Metric.update(", "fails in batch 2 of 'train': ValueError: of mine", "Engine(metrics=None)"),
    ),
    "a metric's compute": (
        lambda: engine(metrics=Metric("compute")).evaluate(DATA, batch_size=8, verbose=0),
        ("Metric.compute([8, 3], [8]) fails in batch 1 of 'eval': ValueError: of mine",),
    ),
    "a metric's value": (
        lambda: fit(engine(metrics=Metric("accumulate"))),
        ("Metric.accumulate() fails in batch 2 of 'train': ValueError: of mine",),
    ),
    "not prepared": (lambda: engine().run(BATCH), ("run(mode='train'): the engine is not prepared", "engine.prepare(")),
    "no shapes": (lambda: engine().cost(), ("nothing says what a batch is yet: prepare(inputs_spec=InputSpec(",)),
    "no program": (lambda: engine().main_program, ("nothing says what a batch is yet", "or run a step first")),
    "negatives of the batch": (
        lambda: fit(engine(contrast)),
        ("mm at ", "takes rows of the batch together", "accumulate_steps=1", "microbatch_loss=True"),
    ),
    "no such schedule": (lambda: engine(schedule_mode="2F2B"), ("schedule_mode='2F2B'", "there are 1F1B, F-then-B")),
    "no virtual stages": (
        lambda: engine(schedule_mode="ZBH2", vpp_degree=2),
        ("with pipeline.vpp_degree=2", "2 for VPP, BFS and ZBV, 1 for the others"),
    ),
    "no such module": (lambda: fit(engine(at=["head"])), ("at='head': no module of that path", "there are ")),
    "no such degree": (lambda: fit(engine(degree=3)), ("pipeline.degree=3: does not divide the 2 rank(s)",)),
    "no microbatch": (lambda: engine(accumulate_steps=0), ("pipeline.accumulate_steps=0: want 1 or more",)),
    "no checkpoint": (lambda: engine().load("nowhere"), ("nowhere was not loaded", "does not exist")),
}


def _said() -> dict[str, str]:
    found = {}
    for name, (mistake, _) in TABLE.items():
        try:
            found[name] = f"nothing was said: {mistake()}"
        except OnecardError as fault:
            found[name] = str(fault)
    return found


@pytest.mark.parametrize(("section", "count"), [("pipeline", "accumulate_steps"), ("gradient_merge", "k_steps")])
def test_the_loss_of_microbatches_may_be_meant(section: str, count: str) -> None:
    """On one rank; the first step, which makes states, takes the batch as it is."""
    torch.manual_seed(0)
    x, y, model, alone = torch.randn(8, 4), torch.arange(8) % 3, nn.Linear(4, 3), nn.Linear(4, 3)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for parts in (1, 2):
        optimizer.zero_grad()
        for part in x.chunk(parts):
            (contrast(alone(part), y) / parts).backward()
        optimizer.step()
    strategy = {section: {"enable": True, count: 2, "microbatch_loss": True}}
    made = oc.Engine(model, contrast, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    made.fit([*zip(x, y.tolist(), strict=True)], batch_size=8, epochs=2, verbose=0)
    torch.testing.assert_close(model.weight, alone.weight)


@pytest.mark.proof
def test_each_mistake_is_told_on_all_ranks() -> None:
    for found in run_ranks(_said, 2, timeout=120.0):
        wrong = {name: said for name, said in found.items() if not all(part in said for part in TABLE[name][1])}
        assert wrong == {} and found.keys() == TABLE.keys()
