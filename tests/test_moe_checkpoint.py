"""Checkpoints of mixtures: experts on other ranks, and on one card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import share
from fleet_programs import begin
from moe_programs import Mixture, Net, batches
from torch import Tensor

import onecard as oc
from onecard import fleet
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
