"""What an Engine is made of, set again by a program; modules that say themselves which parts of them are in training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import EngineError
from onecard.testing import run_ranks

BATCHES = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), (torch.arange(8) + i) % 3) for i in range(6)]


class Frozen(nn.Module):
    """A norm that keeps its statistics, as ``train`` says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).tanh())


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, label_smoothing=0.3)


def plain() -> list[float]:
    net, losses = Frozen(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    for i, (x, y) in enumerate(BATCHES):
        net.train()
        loss = (cross_entropy if i < 3 else smoothed)(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0 if i < 4 else 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained() -> list[float]:
    net = Frozen()
    engine = oc.Engine(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.5, momentum=0.9))
    engine.clip_grad_norm = 1.0
    engine.prepare(mode="train")
    losses = []
    for i, batch in enumerate(BATCHES):
        if i == 3:
            engine.loss = smoothed
        if i == 4:
            engine.clip_grad_norm = 0.01
        losses.append(float(engine.run(batch)["loss"]))
        engine.run(batch, mode="eval")
        engine.to_mode("train")
    return losses


@pytest.mark.proof
def test_a_loss_and_a_norm_that_are_set_again_count_from_the_next_step_on() -> None:
    for losses in run_ranks(trained, 2):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain()))


def engine() -> oc.Engine:
    net = Frozen()
    made = oc.Engine(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.5))
    made.prepare(mode="train")
    return made


def adamw(of: oc.Engine) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.model.parameters())


REFUSED: dict[str, tuple[Callable[[oc.Engine], Any], str]] = {
    "optimizer": (adamw, "laid out once, as the strategy says: make another one"),
    "model": (lambda of: Frozen(), "laid out once"),
    "strategy": (lambda of: oc.Strategy(), "laid out once"),
    "loss": (lambda of: nn.AdaptiveLogSoftmaxWithLoss(4, 3, [1]), "it has parameters"),
    "clip_grad_norm": (lambda of: -1.0, "want a number above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_laid_out_once_is_not_set_again(name: str) -> None:
    value, words = REFUSED[name]
    made = engine()
    with pytest.raises(EngineError, match=words):
        setattr(made, name, value(made))


def test_whether_there_are_labels_is_said_once() -> None:
    with pytest.raises(EngineError, match="whether a batch has labels is said once"):
        engine().loss = None


def test_another_engine_takes_over_what_is_laid_out() -> None:
    first = engine()
    first.run(BATCHES[0])
    second = oc.Engine(first.model, smoothed, adamw(first))
    second.prepare(mode="train")
    assert second.run(BATCHES[1])["loss"] > 0


def unfrozen(on: str) -> list[float]:
    """The first layer is trained from the third batch on, in a group of its own."""
    net = Frozen()
    net.first.requires_grad_(False)
    optimizer = torch.optim.SGD([*net.norm.parameters(), *net.head.parameters()], 0.5)
    engine = None
    if on:
        engine = oc.Engine(net, nn.CrossEntropyLoss(), optimizer, clip_grad_norm=0.05)
        engine.prepare(mode="train")
    losses = []
    for i, (x, y) in enumerate(BATCHES):
        if i == 2:
            net.first.requires_grad_(True)
            optimizer.add_param_group({"params": [*net.first.parameters()], "lr": 0.4})
        if engine is not None:
            losses.append(float(engine.run((x, y))["loss"]))
            continue
        net.train()
        loss = cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_group_that_is_added_later_is_clipped_with_the_others(ranks: int) -> None:
    """It was neither clipped nor counted in the norm."""
    wanted, found = unfrozen(""), run_ranks(in_silence, ranks)[0]
    assert found == pytest.approx(wanted, rel=1e-5)


def in_silence() -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is recorded anew
        return unfrozen("engine")
