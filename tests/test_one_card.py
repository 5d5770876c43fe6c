"""one_card: what a program sees within it, and what is there after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.errors import AutoError, MeshError
from onecard.integrations import one_card, shard_inputs
from onecard.testing import run_ranks


def _marked(folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    before = os.environ.get("RANK")
    if oc.get_rank():
        torch.rand(3)  # a rank whose numbers stand elsewhere
    with one_card():
        found: dict[str, Any] = {
            "drawn": torch.rand(1).item(),
            "env": [os.environ.get(n) for n in ("RANK", "WORLD_SIZE")],
        }
        mesh = oc.ProcessMesh([0, 1], ["dp"])
        torch.manual_seed(0)
        model = shard_inputs(oc.shard_layer(nn.Linear(4, 2), mesh), mesh, "dp")
        out = model(input=torch.arange(32.0).view(8, 4))
        found |= {
            "cut": str(out.placements),
            "sum": out.sum().item(),
            "json": json.dumps({"loss": out.sum().detach().item()}),
        }
        os.makedirs("mine")
        torch.save(model.state_dict(), "mine/model.pt")
        oc.checkpoint.save(model.state_dict(), "parts")
        found |= {"files": os.listdir("mine"), "loaded": type(torch.load("mine/model.pt")["weight"]).__name__}
    found |= {"after": sorted(os.listdir(".")), "back": os.environ.get("RANK") == before}
    state = model.state_dict()
    oc.checkpoint.load("parts", state)
    return {**found, "save": torch.save.__module__}


def test_marks_within(tmp_path):
    """The same on both ranks; files are there for all after it; parts of a checkpoint are those of all ranks."""
    first, second = run_ranks(_marked, 2, tmp_path, timeout=60.0)
    assert first == second
    torch.manual_seed(0)
    wanted = nn.Linear(4, 2)(torch.arange(32.0).view(8, 4)).sum().item()
    assert first["sum"] == pytest.approx(wanted, rel=1e-5) and json.loads(first["json"])["loss"] == first["sum"]
    assert first["cut"] == "(Shard(dim=0),)" and first["env"] == [None, None] and first["back"]
    assert first["files"] == ["model.pt"] and first["loaded"] == "Tensor" and first["after"] == ["mine", "parts"]
    assert first["save"] == "torch.serialization"


def test_twice_is_refused():
    with (
        one_card(),
        pytest.raises(AutoError, match=r"test_one_card\.py:\d+: one_card: the program sees one card already"),
    ):
        one_card()
    with one_card():
        pass


def test_a_library_that_has_counted_ranks(monkeypatch):
    class States:
        class PartialState:
            _shared_state = {"num_processes": 2, "process_index": 1}  # noqa: RUF012

    monkeypatch.setitem(__import__("sys").modules, "accelerate.state", States)
    with pytest.raises(AutoError, match=r"accelerate has taken this process for rank 1 of several"):
        one_card()


def test_an_axis_that_is_not_there():
    with pytest.raises(MeshError, match="no axis 'tp': one of dp"):
        shard_inputs(nn.Linear(2, 2), oc.ProcessMesh([0], ["dp"]), "tp")


def _folders(leave: bool) -> str:
    within = one_card()
    with open("of_mine.txt", "w") as file:
        file.write("rank's own" if oc.get_rank() else "the program's")
    if leave:
        within.__exit__(None, None, None)
    return within._files.folder if oc.get_rank() else ""


@pytest.mark.parametrize("leave", [True, False], ids=["left", "open at the end"])
def test_folders_of_ranks_go(tmp_path, monkeypatch, leave):
    """Where a rank other than 0 writes goes with the context, at the latest with its process."""
    monkeypatch.chdir(tmp_path)
    folder = run_ranks(_folders, 2, leave, timeout=60.0)[1]
    assert folder and not os.path.exists(folder)
    assert (tmp_path / "of_mine.txt").read_text() == "the program's"
