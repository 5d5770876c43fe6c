"""What a state may hold, and in which forms; background saves; changes at load; the formats of others."""

from __future__ import annotations

import collections
import itertools
import math
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import onecard as oc
from onecard.checkpoint import Fuse, Rename, Split, Transpose, files
from onecard.checkpoint.index import NAME
from onecard.checkpoint.reading import Reader
from onecard.errors import CheckpointError
from onecard.testing import multirank

MESH = oc.ProcessMesh([0, 1], ["x"])


def equal(a: Any, b: Any) -> bool:
    """Deep equality, tensors by bits, dtypes and types included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(oc.unshard(a.detach()), oc.unshard(b.detach()))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


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
    with pytest.raises(CheckpointError, match="two tensors would be called 'a.b'"):
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
    return {"model": net, "optimizer": optimizer, "schedule": schedulers, "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}


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
        assert more[0] == pytest.approx(more[1], rel=1e-5) if source is not target else more[0] == more[1], (source, target)


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
    template = {"model": fresh["model"].state_dict(), "optimizer": torch.optim.Adam(fresh["model"].parameters()).state_dict()}
    loaded = oc.load_state_dict(template, tmp_path / "0")
    again = torch.optim.Adam(fresh["model"].parameters(), amsgrad=True)
    again.load_state_dict(loaded["optimizer"])
    assert all(equal(again.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"]) for p in fresh["model"].parameters())
    only = objects("sgd", None)["model"]
    oc.checkpoint.load(tmp_path / "1", {"model": only})  # a part of what there is
    assert equal(only.first.weight, saved["model"].first.weight)
    with pytest.raises(CheckpointError, match="9 tensors without a place in the state: 'model."):
        oc.checkpoint.load(tmp_path / "1", {"model": nn.ModuleDict({"second": only.second})}, missing="keep")
    oc.checkpoint.load(tmp_path / "1", {"net": only}, changes=[Rename("model.*", "net.*")])


@multirank(2)
def test_one_file_for_each_rank_and_what_one_holds(tmp_path: Path) -> None:
    """Seed 004: one shard a rank. Tied weights and copies are written once, each rank's file has its part."""
    whole = torch.arange(4_000_000.0).view(2000, 2000)
    state = {"cut": oc.shard_tensor(whole, MESH, [oc.Shard(0)]), "copied": oc.shard_tensor(whole, MESH, [oc.Replicate()]), "plain": whole}
    state["again"] = state["plain"]
    oc.save_state_dict(state, tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 1.01 * min(sizes) and sum(sizes) < 3.01 * whole.nbytes
    into = {"cut": oc.shard_tensor(torch.zeros_like(whole), MESH, [oc.Shard(0)])}
    read = counted(lambda: oc.load_state_dict(into, tmp_path, unexpected="ignore"))
    assert equal(into["cut"], state["cut"]) and read < 1.01 * whole.nbytes / 2  # this rank's half, and headers
    turned = {"cut": oc.shard_tensor(torch.zeros_like(whole), oc.ProcessMesh([1, 0], ["y"]), [oc.Shard(0)])}
    assert counted(lambda: oc.load_state_dict(turned, tmp_path)) < 1.01 * whole.nbytes / 2
    assert equal(turned["cut"], state["cut"])
    assert equal(oc.checkpoint.load(tmp_path)["again"], whole)


def counted(act: Any) -> int:
    """Bytes that are read meanwhile."""
    total, before = [0], Reader._fill

    def fill(self: Reader, file: Any, data: memoryview, offset: int) -> None:
        total[0] += data.nbytes
        before(self, file, data, offset)

    Reader._fill = fill  # type: ignore[method-assign]
    try:
        act()
    finally:
        Reader._fill = before  # type: ignore[method-assign]
    return total[0]


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
    files.watchers.append(lambda operation, path: hold.wait(20) if operation == "write" else None)  # a disk that is slow
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


# changes


def test_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, k, v, up = torch.randn(4, 6), torch.randn(2, 6), torch.randn(2, 6), torch.randn(6, 8)
    old = {"a.q.weight": q, "a.k.weight": k, "a.v.weight": v, "a.up": up, "a.q.step": torch.tensor(3.0),
           "a.k.step": torch.tensor(3.0), "a.v.step": torch.tensor(3.0)}  # fmt: skip
    oc.save_state_dict(old, tmp_path / "old")
    fuse = Fuse(["*.q.*", "*.k.*", "*.v.*"], "*.qkv.*")
    new = {"b.qkv.weight": torch.zeros(8, 6), "b.up": torch.zeros(8, 6, dtype=torch.float64), "b.qkv.step": torch.zeros(())}
    oc.load_state_dict(new, tmp_path / "old", changes=[fuse, Transpose("*.up"), Rename("a.*", "b.*")], dtype="cast")
    assert torch.equal(new["b.qkv.weight"], torch.cat([q, k, v])) and torch.equal(new["b.up"], up.T.double())
    assert new["b.qkv.step"] == 3
    oc.save_state_dict(new, tmp_path / "new")
    split = Split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"], sizes=[4, 2, 2])
    back = {name: torch.zeros_like(x) for name, x in old.items()}
    oc.load_state_dict(back, tmp_path / "new", changes=[split, Rename("b.*", "a.*"), Transpose("a.up")], dtype="cast")
    assert equal(back, old)

    def said(*changes: Any, **how: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            oc.load_state_dict({}, tmp_path / "old", changes=changes, **how)
        return str(caught.value)

    assert "no tensor of the checkpoint is called 'a.qq.weight'; the nearest names: a.q.weight" in said(Rename("a.qq.weight", "x"))
    assert "two tensors would be called 'x'" in said(Rename("a.*", "x"))
    assert "cannot be joined along dim 1" in said(Fuse(["*.q.weight", "*.k.weight"], "*.qk", dim=1))
    assert "but no 'a.w.weight'" in said(Fuse(["*.q.weight", "*.w.weight"], "*.qw"))
    assert "has 4 indices in dim 0, not 3 + 2" in said(Split("*.q.weight", ["*.1", "*.2"], sizes=[3, 2]))
    assert "has no dim 2" in said(Transpose("a.up", (0, 2)))
    assert "more *" in said(Rename("a.up", "*.up"))


@multirank(2)
def test_changes_on_any_layout(tmp_path: Path) -> None:
    """Every change beside cuts of every dim: as the one-card program makes it."""
    torch.manual_seed(1)
    parts = [torch.randn(5, 7) for _ in range(3)]
    for number, placements in enumerate(([oc.Shard(0)], [oc.Shard(1)], [oc.Replicate()])):
        place = tmp_path / str(number)
        oc.save_state_dict({f"p{i}": oc.shard_tensor(x, MESH, placements) for i, x in enumerate(parts)}, place)
        for dim, turn, target in itertools.product((0, 1), (False, True), ([oc.Shard(0)], [oc.Shard(1)], [oc.Replicate()])):
            expected = torch.cat(parts, dim).T if turn else torch.cat(parts, dim)
            changes: list[Any] = [Fuse(["p0", "p1", "p2"], "w", dim), *([Transpose("w")] if turn else [])]
            into = oc.shard_tensor(torch.zeros_like(expected), MESH, target)
            oc.load_state_dict({"w": into}, place, changes=changes)
            assert equal(into, expected.contiguous()), (placements, dim, turn, target)


def test_an_optimizer_follows_its_fused_parameters(tmp_path: Path) -> None:
    apart = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkv"})
    optimizer = torch.optim.AdamW(apart.parameters(), lr=0.3)
    for number in range(2):
        sum((layer(torch.ones(4) * i).square().sum() for i, layer in enumerate(apart.values(), 1 + number)), torch.zeros(())).backward()
        optimizer.step()
    oc.checkpoint.save({"model": apart, "optimizer": optimizer}, tmp_path)
    joined = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})
    new = torch.optim.AdamW(joined.parameters(), lr=0.1)
    changes = [Fuse(["*q.weight*", "*k.weight*", "*v.weight*"], "*qkv.weight*")]
    oc.checkpoint.load(tmp_path, {"model": joined, "optimizer": new}, changes=changes)
    [state] = new.state.values()
    expected = torch.cat([optimizer.state[p]["exp_avg"] for p in apart.parameters()])
    assert torch.equal(state["exp_avg"], expected) and state["step"] == 2 and new.param_groups[0]["lr"] == 0.3


# the formats of others


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)


def megatron(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(layer, Block):
        layer.up.weight = oc.shard_tensor(layer.up.weight, mesh, [oc.Shard(0)])
        layer.up.bias = oc.shard_tensor(layer.up.bias, mesh, [oc.Shard(0)])
        layer.down.weight = oc.shard_tensor(layer.down.weight, mesh, [oc.Shard(1)])


def huggingface_folder(place: Path, tensors: dict[str, Tensor]) -> None:
    """As transformers writes one: two files and an index."""
    import json

    place.mkdir()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in shards.items():
        safetensors.torch.save_file({n: tensors[n].contiguous() for n in mine}, place / file, metadata={"format": "pt"})
    where = {n: file for file, mine in shards.items() for n in mine}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@multirank(2)
def test_a_huggingface_folder(tmp_path: Path) -> None:
    torch.manual_seed(3)
    original = nn.ModuleList([Block(), Block()])
    tensors = {f"model.{name}": x.detach() for name, x in original.state_dict().items()}
    place = tmp_path / "hf"
    if oc.get_rank() == 0:
        huggingface_folder(place, tensors)
    dist.barrier()
    model = oc.shard_layer(nn.ModuleList([Block(), Block()]), MESH, megatron)
    read = counted(lambda: oc.load_state_dict(model, place, changes=[Rename("model.*", "*")]))
    assert equal(dict(model.state_dict()), dict(original.state_dict()))
    cut = sum(x.nbytes for name, x in tensors.items() if "up" in name or "down.weight" in name)
    copied = sum(x.nbytes for x in tensors.values()) - cut
    assert read == cut / 2 + copied  # each byte of what is cut by one rank only
    assert oc.checkpoint.verify(place) == []
    oc.save_state_dict({"model": model}, tmp_path / "ours")
    oc.checkpoint.convert(tmp_path / "ours", tmp_path / "back", "huggingface", max_shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) >= 2
    again: dict[str, Tensor] = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        again |= safetensors.torch.load_file(file)
    assert sorted(again) == sorted(tensors) and all(equal(again[n], x) for n, x in tensors.items())
    loaded = oc.checkpoint.load(tmp_path / "back")
    assert all(equal(loaded[n], x) for n, x in tensors.items())
    oc.checkpoint.convert(tmp_path / "ours", tmp_path / "alone", "huggingface", only="model")
    assert sorted(safetensors.torch.load_file(tmp_path / "alone" / "model.safetensors")) == sorted(original.state_dict())


@multirank(2)
def test_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    """DCP saves and loads distributed tensors, convert reads its folders and writes them."""
    whole = torch.arange(21.0).view(7, 3)
    state = {"w": oc.shard_tensor(whole, MESH, [oc.Shard(0)]), "r": oc.shard_tensor(whole, MESH, [oc.Replicate()]),
             "p": oc.from_local(torch.ones(3), MESH, [oc.Partial()]), "n": {"step": 3, "list": [1, torch.ones(2)]}}  # fmt: skip
    place = str(tmp_path / "dcp")
    where = [place]
    dist.broadcast_object_list(where)
    dcp.save(state, checkpoint_id=place)
    into = {"w": oc.shard_tensor(whole * 0, MESH, [oc.Shard(1)]), "r": oc.shard_tensor(whole * 0, MESH, [oc.Shard(0)]),
            "p": oc.shard_tensor(torch.zeros(3), MESH, [oc.Replicate()])}  # fmt: skip
    dcp.load(into, checkpoint_id=place)
    assert equal(into["w"], whole) and equal(into["r"], whole) and oc.unshard(into["p"]).tolist() == [2.0] * 3
    with pytest.raises(CheckpointError, match="torch.distributed.checkpoint.*convert"):
        oc.checkpoint.load(place)
    oc.checkpoint.convert(place, tmp_path / "ours")
    found = oc.checkpoint.load(tmp_path / "ours")
    assert equal(found["w"], whole) and found["n"]["step"] == 3 and equal(found["n"]["list"], [1, torch.ones(2)])
    for format in ("dcp", "torch"):
        oc.checkpoint.convert(tmp_path / "ours", tmp_path / f"as {format}", format)
    assert equal(torch.load(tmp_path / "as torch", weights_only=True), found)
    plain = {"w": torch.zeros(7, 3)}
    if oc.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(plain, checkpoint_id=str(tmp_path / "as dcp"), no_dist=True)
        assert equal(plain["w"], whole)
    dist.barrier()


class Evil:
    """What a crafted file would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_no_code_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Evil(ran)}))
    with pytest.raises(CheckpointError, match=r"names pathlib.*Path.touch|names .*touch|may run code|cannot be|no checkpoint"):
        oc.checkpoint.convert(folder, tmp_path / "out")
    torch.save({"x": Evil(ran)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        oc.checkpoint.convert(tmp_path / "evil.pt", tmp_path / "out")
    (tmp_path / "not.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no file of torch.save"):
        oc.checkpoint.convert(tmp_path / "not.pt", tmp_path / "out")
    oc.save_state_dict({"x": torch.ones(1)}, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        oc.checkpoint.convert(tmp_path / "out", tmp_path / "out")
    with pytest.raises(CheckpointError, match="format='gguf': want one of onecard, huggingface"):
        oc.checkpoint.convert(tmp_path / "out", tmp_path / "other", "gguf")
    assert not ran.exists()


def test_crafted_safetensors(tmp_path: Path) -> None:
    import json

    def write(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
        text = json.dumps(header).encode() if not isinstance(header, bytes) else header
        path = tmp_path / "x.safetensors"
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
        return path

    good = {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    assert torch.equal(oc.checkpoint.load(write(good))["x"], torch.zeros(2, 2))
    for make, words in [
        (lambda: write(good, length=2**62), "header would have"), (lambda: write(b"[1]"), "damaged"),
        (lambda: write(b"[" * 100_000), "damaged"), (lambda: write(good, b"\0" * 8), "do not lie within"),
        (lambda: write({"x": {**good["x"], "shape": [2**40, 2**20]}}), "does not have"),
        (lambda: write({"x": {**good["x"], "shape": [-2, -2]}}), "cannot be"),
        (lambda: write({"x": {**good["x"], "dtype": "F99"}}), "cannot be"),
    ]:  # fmt: skip
        path = make()
        with pytest.raises(CheckpointError, match=words):
            oc.checkpoint.load(path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="out of the folder"):
        oc.checkpoint.load(tmp_path / "hf")

