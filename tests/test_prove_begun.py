"""How the runs of a proof begin: initial values that differ are no rounding; a rank has a disk that is gone with the run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import onecard as oc


def _weights(how: str) -> torch.Tensor:
    if how == "of a rank's seed":
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    if how == "of numpy's, unseeded":
        return torch.from_numpy(np.random.randn(4, 6))
    if how == "of a generator without a seed":
        return torch.from_numpy(np.random.default_rng().standard_normal((4, 6)))
    return torch.randn(4, 6)


def trained(how: str = "alike") -> None:
    """A step by hand; its weight or its batch is drawn by nobody's seed, or by the rank's."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    x = torch.from_numpy(np.random.default_rng().standard_normal((8, 6))) if how == "batch" else torch.randn(8, 6)
    with torch.no_grad():
        model.weight.copy_(_weights(how))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    F.mse_loss(model(x.to(model.weight.dtype)), torch.randn(8, 4)).backward()
    optimizer.step()


HOW = {
    "of a rank's seed": "weight begins with another value on rank 1",
    "of numpy's, unseeded": "weight begins with another value on rank 1",
    "of a generator without a seed": "gives other numbers each time, from the initial value of weight on",
    "batch": "gives other numbers each time, from the gradient of weight in step 1 on",
}


@pytest.mark.share(1)
@pytest.mark.parametrize("how", HOW)
def test_what_begins_apart_is_no_rounding(how: str) -> None:
    """An ulp moves a program that draws without a seed as far as its draw does: that was taken for rounding."""
    proof = oc.prove(trained, how, world=2, rounding=False)
    assert not proof and proof.rounded == "", str(proof)
    assert HOW[how] in str(proof) and proof.data()["begun"] == proof.begun != "", str(proof)
    assert proof.first is not None and "test_prove_begun.py" in proof.first.line


def test_a_part_that_is_drawn_apart_is_told_of_all_ranks() -> None:
    def cut(whole: bool) -> None:
        torch.manual_seed(0)
        n, me = dist.get_world_size(), dist.get_rank()
        model = nn.Linear(6, 4, bias=False)
        drawn = torch.Generator().manual_seed(me + 1)
        mine = model.weight.detach().chunk(n)[me] if whole else torch.randn(4 // n, 6, generator=drawn)
        model.weight = nn.Parameter(mine.clone())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(8, 6)).sum().backward()
        optimizer.step()

    assert oc.prove(cut, True, world=2, rounding=False)
    proof = oc.prove(cut, False, world=2, rounding=False)
    assert "ranks [0, 1] have [2, 6], which is no part of one card's [4, 6]" in str(proof), str(proof)
    assert "weight begins with another value on ranks [0, 1]" in proof.begun


def test_a_program_that_fails_in_both_precisions_says_why_in_both() -> None:
    """A refusal on ranks was hidden by what one card says of the other precision."""

    def needs_float64() -> torch.Tensor:
        x = torch.ones(2, dtype=torch.float64) @ torch.ones(2)
        if dist.get_world_size() > 1:
            raise RuntimeError("refused on ranks")
        return x

    with pytest.raises(oc.errors.ProofError, match=r"same dtype[\s\S]*In float64 [\s\S]*refused on ranks"):
        oc.prove(needs_float64, world=2)


def writing() -> None:
    """Rank 0 leaves a file for all; each rank saves to one path, reads it back, and appends to a log."""
    n, me = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    if me == 0:
        os.makedirs("out/data")
        torch.save(x, "out/data/x.pt")
    dist.barrier()
    x = torch.load("out/data/x.pt").chunk(n)[me]
    model = nn.Linear(4, 2)
    model(x).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= n
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.save(me, "out/mine.pt")
    dist.barrier()
    assert torch.load("out/mine.pt") == me, "another rank has written over it"
    Path(f"out/log-{me}").write_text("x")
    dist.barrier()
    assert sorted(name for name in os.listdir("out") if name.startswith("log")) == [f"log-{r}" for r in range(n)]


@pytest.mark.parametrize("processes", [False, True])
def test_ranks_share_a_disk_and_none_writes_over_another(processes: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    proof = oc.prove(writing, world=2, rounding=False, processes=processes)
    assert proof and [*tmp_path.iterdir()] == [], str(proof)


def saving() -> None:
    """A program for one card: a folder that must not be there, a file under another name."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    os.mkdir("steps")
    for step in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        torch.save({"step": step, "model": model.state_dict()}, "steps/new.pt")
        os.rename("steps/new.pt", "steps/last.pt")
        assert torch.load("steps/last.pt")["step"] == step


def test_under_a_plan_each_rank_writes_one_cards_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert oc.prove(saving, plan=oc.Plan(dp=2), rounding=False)
    assert [*tmp_path.iterdir()] == []


def test_a_script_finds_what_it_has_saved_on_real_ranks(tmp_path: Path, monkeypatch, capsys) -> None:
    """One that makes its process group itself."""
    from onecard.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 2)\nmodel(torch.ones(2, 4)).sum().backward()\n"
        "torch.save(model.state_dict(), 'model.pt')\nmodel.load_state_dict(torch.load('model.pt'))\n"
        "torch.optim.SGD(model.parameters(), 0.1).step()\ndist.destroy_process_group()\n"
    )
    assert main(["prove", "train.py", "--processes"]) == 0, capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
