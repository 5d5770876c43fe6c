"""Checkpoints of mixtures: experts on other ranks, and on one card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import share
from fleet_programs import begin
from moe_programs import Mixture, Net, batches
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.errors import CheckpointError
from onecard.testing import run_ranks


def built(kind: str, degrees: dict[str, int], seed: int) -> Any:
    begin(**degrees)
    oc.manual_seed(seed)
    what = Mixture(degrees, {"type": "topk", "bias_rate": 0.1}, kind, experts=4)
    net = Net(what)
    model = fleet.distributed_model(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, y, _ = batches(what)[0]
    data = fleet.get_hybrid_communicate_group().data()
    loss = torch.nn.functional.cross_entropy(
        model(x.chunk(data.size)[data.index]).flatten(0, 1), y.chunk(data.size)[data.index].flatten()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def whole(net: Any, optimizer: Any) -> dict[str, Tensor]:
    found = {n: p.detach().clone() for n, p in net.named_parameters()}
    return found | {
        f"state of {n}": optimizer.state[p]["exp_avg"].clone()
        for n, p in net.named_parameters()
        if p in optimizer.state
    }


def saves(kind: str, degrees: dict[str, int], folder: str) -> dict[str, Tensor]:
    net, optimizer = built(kind, degrees, 1)
    oc.save_state_dict({"model": net, "optimizer": optimizer}, folder)
    return whole(net, optimizer)


def loads(kind: str, degrees: dict[str, int], folder: str) -> dict[str, Any]:
    net, optimizer = built(kind, degrees, 2)
    oc.load_state_dict({"model": net, "optimizer": optimizer}, folder)
    parts = {n: [box for box, _ in fleet.held(p).boxes()] for n, p in net.named_parameters()}
    return {"values": whole(net, optimizer), "parts": parts}


WAYS = [
    ("modules", {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2}),
    ("stacked", {"dp": 4, "ep": 4}, {}),
    ("stacked", {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}),
    ("modules", {"dp": 2, "ep": 2}, {}),
]


@pytest.mark.proof
@pytest.mark.parametrize("way", share(WAYS, 1), ids=str)
def test_experts_are_found_on_other_ranks(way: Any, tmp_path: Path) -> None:
    kind, before, after = way
    run_ranks(saves, before.get("dp", 1), kind, before, str(tmp_path / "c"))
    single = run_ranks(loads, 1, kind, {}, str(tmp_path / "c"))[0]["values"]
    other = run_ranks(saves, 1, kind, {}, str(tmp_path / "one"))[0]
    for name, value in single.items():  # one card's own step has the same numbers
        assert (value - other[name]).abs().max() <= 1e-4 * other[name].abs().max() + 1e-6, name
    for each in run_ranks(loads, after.get("dp", 1), kind, after, str(tmp_path / "c")):
        for name, value in each["values"].items():
            of = name.removeprefix("state of ")
            box = each["parts"][of][0]
            assert torch.equal(value, single[name][tuple(slice(*span) for span in box)]), name


def idle(folder: str) -> list[int]:
    """An expert without tokens has no states: saved, loaded into the same objects and into new ones."""
    begin(dp=2, ep=2)
    torch.manual_seed(0)
    gate = {"type": "topk", "top_k": 1, "linear_bias": True}
    moe = fleet.meta_parallel.MoELayer(8, [nn.Linear(8, 8) for _ in range(4)], gate, num_experts=4)
    with torch.no_grad():
        moe.gate.gate.bias[0] = moe.gate.gate.bias[3] = -100.0
    model = fleet.distributed_model(nn.Sequential(nn.Linear(8, 8), moe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(16, 8).chunk(2)[oc.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = [len(optimizer.state)]
    oc.checkpoint.save({"model": model, "optimizer": optimizer}, folder, step=1)
    for into in (optimizer, torch.optim.AdamW(model.parameters(), lr=1e-3)):
        oc.checkpoint.load(folder, {"model": model, "optimizer": into})
        counts.append(len(into.state))
    some = torch.optim.AdamW([p for name, p in model.named_parameters() if "1.gate" not in name], lr=1e-3)
    with pytest.raises(CheckpointError, match=r"1\.gate\.gate\.weight"):  # which no rank's optimizer has
        oc.checkpoint.load(folder, {"model": model, "optimizer": some})
    return counts


def test_experts_without_states_are_saved_and_loaded(tmp_path: Path) -> None:
    for counts in run_ranks(idle, 2, str(tmp_path / "c")):
        assert counts == [counts[0]] * 3
