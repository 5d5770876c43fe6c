"""What a state may hold, and in which forms; what is written and read of it; saves in the background."""

from __future__ import annotations

import collections
import itertools
import math
import random
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from checkpoints import counted, equal
from torch import Tensor, nn

import onecard as oc
from onecard.checkpoint import Rename
from onecard.checkpoint.format import crc, files
from onecard.checkpoint.format.index import NAME
from onecard.errors import CheckpointError
from onecard.testing import multirank

MESH = oc.ProcessMesh([0, 1], ["x"])


def test_any_nested_state(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -5.5, True, None, "text", 10**30, math.inf, float("nan"), 5e-324, -0.0],
        "tuple": (1, (2, [3])), "empty": {}, "none": None, 7: "a number as a key", "bytes": b"\x00\xff",
        "nested": {"a.b": torch.ones(2), "": torch.zeros(0, 3)}, "dtype": torch.bfloat16,
        "scalar": torch.tensor(3), "turned": torch.arange(6).view(2, 3).T, "conj": torch.tensor([1 + 2j]).conj(),
        "cut": torch.arange(10)[2:8:2], "counter": collections.Counter({3: 1, 5: 2}), "$": {"$": 1},
        "list": [torch.ones(1), {"x": torch.eye(2, dtype=torch.float64)}], "bits": torch.tensor([True, False]),
    }  # fmt: skip
    oc.save_state_dict(state, tmp_path)
    loaded = oc.checkpoint.load(tmp_path)
    assert equal(loaded, state), loaded
    assert isinstance(loaded["counter"], collections.Counter)
    [file] = tmp_path.glob("*.safetensors")
    alone = safetensors.torch.load_file(file)  # nothing else is needed
    assert torch.equal(alone["turned"], state["turned"]) and alone["nested."].shape == (0, 3)
    with pytest.raises(CheckpointError, match=r"two tensors would be called 'a.b'"):
        oc.save_state_dict({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 4, bias=False)
        self.tied = self.second
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "log": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def rows(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def objects(kind: str, mesh: oc.ProcessMesh | None) -> dict[str, Any]:
    torch.manual_seed(0)
    net: nn.Module = Net()
    if mesh is not None:
        net = oc.shard_layer(net, mesh, rows)
    optimizer = OPTIMIZERS[kind](net.parameters())
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ]
    return {
        "model": net,
        "optimizer": optimizer,
        "schedule": schedulers,
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
    }


def step(state: dict[str, Any], number: int) -> float:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

    def closure() -> Any:
        state["optimizer"].zero_grad()
        loss = (state["model"](x) - x).square().mean()
        loss.backward()
        return loss

    loss = state["optimizer"].step(closure)
    for schedule in state["schedule"]:
        schedule.step()
    state["model"].calls += 1
    state["scaler"]._scale = torch.tensor(float(2**number))
    return float(loss.item())


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@multirank(2)
def test_modules_optimizers_and_the_like(kind: str, tmp_path: Path) -> None:
    """Objects, into new ones of another layout and on one card; the next losses are those of the one that was saved."""
    for number, (source, target) in enumerate(itertools.product([MESH, None], repeat=2)):
        if kind == "adafactor" and source is not target:
            continue  # its factors divide by what they sum, in another order
        saved = objects(kind, source)
        for i in range(3):
            step(saved, i)
        place = tmp_path / f"{kind}{number}"
        oc.checkpoint.save(saved, place)
        into = objects(kind, target)
        oc.checkpoint.load(place, into)
        assert into["model"].calls == 3 and into["scaler"].state_dict() == saved["scaler"].state_dict()
        for a, b in zip(into["schedule"], saved["schedule"], strict=True):
            assert a.state_dict() == b.state_dict()
        more = [[step(s, i) for i in range(3, 6)] for s in (saved, into)]
        assert more[0] == pytest.approx(more[1], rel=1e-5) if source is not target else more[0] == more[1], (
            source,
            target,
        )


@multirank(2)
def test_state_dicts_and_names(tmp_path: Path) -> None:
    """An optimizer goes by names: other groups, its state dict alone, a part of the model, a renamed key."""
    saved = objects("adam", MESH)
    for i in range(2):
        step(saved, i)
    whole = {"model": saved["model"].state_dict(), "optimizer": saved["optimizer"].state_dict()}
    for i, form in enumerate((whole, saved)):
        oc.save_state_dict(form, tmp_path / str(i))
        names = {n for n in oc.checkpoint.load(tmp_path / str(i))["optimizer"]["state"]}
        assert names == {n for n, _ in saved["model"].named_parameters()}
    fresh = objects("adam", None)
    shuffled = list(fresh["model"].named_parameters())[::-1]
    optimizer = torch.optim.Adam([{"params": [p]} for _, p in shuffled], amsgrad=True)
    oc.checkpoint.load(tmp_path / "1", {"model": fresh["model"], "optimizer": optimizer})
    for name, p in shuffled:
        theirs = dict(saved["model"].named_parameters())[name]
        assert equal(optimizer.state[p]["exp_avg"], saved["optimizer"].state[theirs]["exp_avg"])
    assert {group["lr"] for group in optimizer.param_groups} == {saved["optimizer"].param_groups[0]["lr"]}
    template = {
        "model": fresh["model"].state_dict(),
        "optimizer": torch.optim.Adam(fresh["model"].parameters()).state_dict(),
    }
    loaded = oc.load_state_dict(template, tmp_path / "0")
    again = torch.optim.Adam(fresh["model"].parameters(), amsgrad=True)
    again.load_state_dict(loaded["optimizer"])
    assert all(
        equal(again.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"]) for p in fresh["model"].parameters()
    )
    only = objects("sgd", None)["model"]
    oc.checkpoint.load(tmp_path / "1", {"model": only})  # a part of what there is
    assert equal(only.first.weight, saved["model"].first.weight)
    with pytest.raises(CheckpointError, match=r"8 tensors and a value without a place in the state: 'model."):
        oc.checkpoint.load(tmp_path / "1", {"model": nn.ModuleDict({"second": only.second})}, missing="keep")
    oc.checkpoint.load(tmp_path / "1", {"net": only.first}, changes=[Rename("model.first.*", "net.*")])


@multirank(2)
def test_one_file_for_each_rank_and_what_one_holds(tmp_path: Path) -> None:
    """Seed 004: one shard a rank. Tied weights and copies are written once, each rank's file has its part."""
    whole = torch.arange(4_000_000.0).view(2000, 2000)
    state = {
        "cut": oc.shard_tensor(whole, MESH, [oc.Shard(0)]),
        "copied": oc.shard_tensor(whole, MESH, [oc.Replicate()]),
        "plain": whole,
    }
    state["again"] = state["plain"]
    oc.save_state_dict(state, tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 1.01 * min(sizes) and sum(sizes) < 3.01 * whole.nbytes
    into = {"cut": oc.shard_tensor(torch.zeros_like(whole), MESH, [oc.Shard(0)])}
    read = counted(lambda: oc.load_state_dict(into, tmp_path, unexpected="ignore"))
    assert equal(into["cut"], state["cut"]) and read < 1.01 * whole.nbytes / 2  # this rank's half, and headers
    turned = {"cut": oc.shard_tensor(torch.zeros_like(whole), oc.ProcessMesh([1, 0], ["y"]), [oc.Shard(0)])}
    assert counted(lambda: oc.load_state_dict(turned, tmp_path, unexpected="ignore")) < 1.01 * whole.nbytes / 2
    assert equal(turned["cut"], state["cut"])
    assert equal(oc.checkpoint.load(tmp_path)["again"], whole)


@pytest.mark.proof
@multirank(2)
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """No whole tensor: 200 MB over two ranks, also where columns become rows and the dtype changes."""
    import resource

    rows, columns = ([oc.Shard(d)] for d in (0, 1))
    torch.manual_seed(oc.get_rank())
    big = oc.from_local(torch.rand(5000, 5000), MESH, columns)
    into = [oc.from_local(torch.rand(shape), MESH, p) for shape, p in (((2500, 10_000), rows), ((5000, 5000), columns))]
    half = oc.from_local(torch.rand(2500, 10_000).bfloat16(), MESH, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    oc.save_state_dict({"w": big}, tmp_path)
    for target in into:
        oc.load_state_dict({"w": target}, tmp_path)
    oc.load_state_dict({"w": half}, tmp_path, dtype="cast")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40_000, f"{grown} kB more, of a shard of 100 MB"
    assert equal(into[0], big) and equal(into[1], big) and equal(half, big.bfloat16())


# in the background


@multirank(2)
def test_training_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    state = {"w": oc.shard_tensor(torch.full((64, 8), 1.0), MESH, [oc.Shard(0)]), "b": torch.full((5,), 1.0)}
    hold = threading.Event()
    files.watchers.append(
        lambda operation, path: hold.wait(20) if operation == "write" else None
    )  # a disk that is slow
    saving = oc.save_state_dict(state, tmp_path, wait=False)
    assert not saving.done()
    state["w"].mul_(7)
    state["b"].zero_()
    dist.barrier()  # messages go on meanwhile
    assert state["w"].sum().item() == 64 * 8 * 7
    hold.set()
    files.watchers.clear()
    saving.wait()
    assert saving.done() and (saving.path / NAME).exists()
    saved = oc.checkpoint.load(tmp_path)
    assert saved["w"].eq(1).all() and saved["b"].eq(1).all()
    for value in range(5):  # each waits for the one before it
        state["w"].fill_(value)
        oc.checkpoint.save(state, tmp_path / "many", step=value, keep=2, wait=False)
    assert [f.step for f in oc.checkpoint.list(tmp_path / "many")][-1] in (3, 4)
    assert oc.checkpoint.load(tmp_path / "many")["w"].eq(4).all()  # a load waits, too


def test_checksums_are_zlibs_by_either_way(monkeypatch):
    """Odd lengths and places, pieces that go on, nothing at all; with the system's fast library and without it."""
    draw = random.Random(0)
    data = bytes(draw.randrange(256) for _ in range(5000))
    cuts = [(a, a + n) for a, n in ((0, 5000), (1, 63), (7, 0), (3, 1), (13, 4099))]
    for found in (crc._libdeflate(), None):
        monkeypatch.setattr(crc, "_libdeflate", lambda found=found: found)
        for start, end in cuts:
            for part in (data[start:end], memoryview(data)[start:end], memoryview(bytearray(data))[start:end]):
                assert crc.crc32(part, 99) == zlib.crc32(part, 99)


def test_arguments_in_the_order_of_another_library_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"the state comes first: save\(state, '.*c'\)"):
        oc.checkpoint.save(tmp_path / "c", {"step": 1})
    with pytest.raises(CheckpointError, match=r"the path comes first: load\('.*c', state\)"):
        oc.checkpoint.load({"step": 1}, str(tmp_path / "c"))
