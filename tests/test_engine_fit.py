"""fit: passes, validation, callbacks, schedulers; killed and started again, on as many ranks and on others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import engine_programs as programs
import pytest
import torch
from torch import nn

import onecard as oc
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


def test_a_killed_fit_goes_on_as_if_nobody_had_killed_it(tmp_path: Path, whole: Any) -> None:
    """Within a pass, and right after one; bit for bit on as many ranks."""
    for die_at in (2, 4):
        with pytest.raises(RankError):
            run_ranks(fit, 2, tmp_path, die_at)
    losses, epochs, parameters = run_ranks(fit, 2, tmp_path, -1)[0]
    assert len(losses) == 4 * EPOCHS and losses == whole[2, 0.2][0]
    assert epochs == whole[2, 0.2][1] and sorted(epochs[0]) == ["acc", "epoch", "loss", "val_acc", "val_loss"]
    assert all(torch.equal(p, whole[2, 0.2][2][name]) for name, p in parameters.items())


def test_on_another_number_of_ranks(tmp_path: Path, whole: Any) -> None:
    with pytest.raises(RankError):
        run_ranks(fit, 2, tmp_path, 6, 0.0)
    losses, epochs, _ = run_ranks(fit, 1, tmp_path, -1, 0.0)[0]
    assert losses == pytest.approx(whole[1, 0.0][0], rel=1e-5)
    assert [epoch["acc"] for epoch in epochs] == [epoch["acc"] for epoch in whole[1, 0.0][1]]


def test_a_fit_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = fit(tmp_path, -1, 0.0)
    assert fit(tmp_path, 0, 0.0)[0] == first[0]  # nothing is left, so that nobody is killed
    with pytest.raises(EngineError, match=r"fit\(resume=False\): .* has checkpoints"):
        fit(tmp_path, -1, 0.0, resume=False)
