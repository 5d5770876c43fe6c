"""Engine with a model that is cut into stages: fit, validation, prediction and checkpoints are one card's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_fit_stopped_and_resumed_as_on_one_card(tmp_path: Path) -> None:
    wanted = _fitted(False)
    for found in run_ranks(_fitted, 2, True, str(tmp_path / "fit"), timeout=300.0):
        for one, other in zip(wanted, found, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)
