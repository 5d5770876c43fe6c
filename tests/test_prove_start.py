"""prove(start=): the state of a job, saved on another mesh, is where both one card and the ranks begin."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recorded_programs as programs
import torch
from amounts import share
from recorded_programs import alone, batch, on_ranks
from torch import nn
from torch.nn import functional as F

import onecard as oc
from onecard.commands import prove as command
from onecard.errors import ProofError
from onecard.testing import run_ranks


def made(zero: int = 0, marks: bool = True) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"]) if marks else None
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
    if mesh is not None:
        oc.shard_layer(model, mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    if mesh is not None and zero:
        stage = (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)[zero - 1]
        optimizer = oc.shard_optimizer(optimizer, stage("dp", mesh))
    return model, optimizer, mesh


def train(
    zero: int = 0, marks: bool = True, steps: int = 2, save: str = "", seed: int = 1, fault: bool = False
) -> list[float]:
    model, optimizer, mesh = made(zero, marks)
    return trained(model, optimizer, mesh, steps, save, seed, fault)


def trained(
    model: Any, optimizer: Any, mesh: Any, steps: int = 2, save: str = "", seed: int = 1, fault: bool = False
) -> Any:
    losses = []
    for step in range(steps):
        x, y = batch(seed + step)
        if mesh is not None:
            x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if fault and oc.get_world_size() > 1:
            states = optimizer.state[model[0].weight]["exp_avg"] if optimizer.state else 0
            states *= 1.01
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        oc.checkpoint.save({"model": model, "optimizer": optimizer, "step": steps}, save)
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two ranks, whose optimizer's states are divided."""
    path = tmp_path_factory.mktemp("job") / "checkpoint"
    run_ranks(train, 2, 1, True, 3, str(path))
    return path


def continued(folder: Path) -> list[float]:
    """What one card computes from there on, without any of it."""
    model, optimizer, _ = made(marks=False)
    oc.checkpoint.load(folder, {"model": model, "optimizer": optimizer, "step": 0})
    return trained(model, optimizer, None, seed=7)


@pytest.mark.proof
@pytest.mark.parametrize("zero", share([3, 2, 1, 0], 1))
def test_a_proof_goes_on_where_a_job_was(folder, zero):
    proof = oc.prove(partial(train, zero, seed=7), world=2, start=folder, rounding=False)
    assert proof and proof.exact, str(proof)
    found = [float(result.right[0]) for result in proof.results if result.kind == "returned"]
    assert found == pytest.approx(continued(folder), rel=1e-5)


def test_a_plan_begins_there_too(folder):
    assert oc.prove(partial(train, 0, False), plan=oc.Plan(dp=2, zero=1), start=folder, rounding=False)


def test_a_state_that_differs_is_found(folder):
    proof = oc.prove(partial(train, fault=True), world=2, start=folder, rounding=False)
    assert not proof and any("0.weight" in result.what for result in proof.wrong), str(proof)


def test_recordings_begin_there(tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Dropout(0.1), nn.Linear(6, 8), nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trained(model, optimizer, None, save=str(tmp_path))
    state = optimizer.state[model[0].weight]["exp_avg"].double()
    proof = oc.prove(on_ranks(programs.marked, 2), against=alone(programs.marked), args=batch(), start=tmp_path)
    assert proof, str(proof)
    first = {r.what: next(iter(r.right.values())) for r in proof.results if r.kind == "initial" and r.right}
    assert torch.allclose(first["the initial value of model.0.weight"], model[0].weight.detach().double())
    assert torch.allclose(first["the initial value of exp_avg of model.0.weight"], state)


def test_what_a_checkpoint_lacks_is_told(tmp_path):
    with pytest.raises(ProofError, match="does not exist"):
        oc.prove(train, world=2, start=tmp_path / "none")
    model, _, _ = made(marks=False)
    oc.checkpoint.save({"model": model}, tmp_path)
    with pytest.raises(ProofError, match="has no state of AdamW"):
        oc.prove(train, world=2, start=tmp_path)


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(3):
    loss = model(torch.randn(8, 8)).square().mean(); loss.backward(); print('loss', loss.item())
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.proof
def test_the_command_begins_there(folder, tmp_path, capsys):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    oc.Plan(dp=2).save(plan)
    assert command.main([str(script), "--plan", str(plan), "--start", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("Equal")
    assert command.main([str(script), "--plan", str(plan), "--start", str(tmp_path)]) == 2
