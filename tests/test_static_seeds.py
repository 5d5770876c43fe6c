"""Seed 000's tables through the static mode, on two and on four ranks."""

from __future__ import annotations

import importlib

import pytest
import static_programs
import torch

import onecard as oc
from onecard.testing import run_ranks

TABLES = {
    "static": [11.943981, -2.2283082, -13.341571, -29.284101, -63.219418],
    "dynamic": [0.0, -0.14513375, -0.2902736, -0.43542737, -0.5806184],
}
assert static_programs.EXAMPLES.exists()  # which puts the examples on the path


def train_000(kernels: str) -> dict[str, tuple[list[float], int]]:
    program = importlib.import_module("model_parallel_000")
    program.mesh = oc.ProcessMesh(list(range(oc.get_world_size())), ["mp"])
    found = {}
    for name in TABLES:
        rng = program.np.random.RandomState(1024)
        weights = program.first_weights(rng)
        data, fc3, rate = (
            (program.static_data(), 0.1, 0.1) if name == "static" else (program.dynamic_data(rng), 0.0, 0.001)
        )
        model = program.SimpleMPNet(*weights, fc3)
        optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=rate))

        def step(
            batch: torch.Tensor, model: torch.nn.Module = model, optimizer: torch.optim.SGD = optimizer
        ) -> torch.Tensor:
            return program.train_batch(batch, model, optimizer).detach()

        run = oc.to_static(step, kernels=kernels)
        losses = [float(oc.unshard(run(torch.from_numpy(x)))) for _, x in zip(range(5), data, strict=False)]
        found[name] = losses, len(run.recordings)
    return found


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_tables_of_seed_000_replayed(ranks: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONECARD_CACHE", str(tmp_path))
    for kernels in ("eager", "fastest") if ranks == 2 else ("eager",):
        for found in run_ranks(train_000, ranks, kernels):
            for name, (losses, recordings) in found.items():
                assert losses == pytest.approx(TABLES[name], rel=1e-5, abs=1e-6 if name == "dynamic" else 0)
                assert recordings == 1, "three of the five steps are replays"
