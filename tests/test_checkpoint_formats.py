"""The formats of others: safetensors, Hugging Face, torch.save, DCP; read without running what is in them."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import counted, equal
from torch import Tensor, nn

import onecard as oc
from onecard.checkpoint import Rename
from onecard.checkpoint.format.index import File, FilePiece, IndexEntry, check_entry, overlap
from onecard.errors import CheckpointError
from onecard.testing import multirank, run_ranks

MESH = oc.ProcessMesh([0, 1], ["x"])


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
    assert sorted(safetensors.torch.load_file(tmp_path / "alone" / "model.safetensors")) == sorted(
        original.state_dict()
    )


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
    with pytest.raises(CheckpointError, match=r"torch.distributed.checkpoint.*convert"):
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
    with pytest.raises(
        CheckpointError, match=r"names pathlib.*Path.touch|names .*touch|may run code|cannot be|no checkpoint"
    ):
        oc.checkpoint.convert(folder, tmp_path / "out")
    torch.save({"x": Evil(ran)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        oc.checkpoint.convert(tmp_path / "evil.pt", tmp_path / "out")
    (tmp_path / "not.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
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
        (lambda: write({**good, "y": {**good["x"], "data_offsets": [4, 20]}}, b"\0" * 20), "of 'y', are another's as well"),
        (lambda: write({"x": {**good["x"], "data_offsets": [4, 20]}}, b"\0" * 20), "follow 4 bytes that are nobody's"),
        (lambda: write(good, b"\0" * 19), "there are 3 bytes that are nobody's"),
        (lambda: write(b'{"x": 1, ' + json.dumps(good).encode()[1:]), "names 'x' twice"),
        (lambda: write({**good, "__metadata__": {"format": 1}}), "__metadata__"),
    ]:  # fmt: skip
        path = make()
        with pytest.raises(CheckpointError, match=words):
            oc.checkpoint.load(path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="out of the folder"):
        oc.checkpoint.load(tmp_path / "hf")


def test_safetensors_own_opinion(tmp_path: Path) -> None:
    """Headers with random faults: what safetensors refuses is refused, and what it takes is read alike."""
    import json

    refused = 0
    for seed in range(400):
        rng, path, at = random.Random(seed), tmp_path / f"{seed}.safetensors", 0
        said: dict[str, Any] = {}
        for i in range(rng.randint(0, 4)):
            shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 2))]
            code, width = rng.choice([("F32", 4), ("U8", 1), ("I64", 8), ("BF16", 2)])
            size = math.prod(shape) * width
            said[f"t{i}"] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        data, fault = rng.randbytes(at), rng.randrange(6)
        one: Any = rng.choice([*said.values()]) if said else {"data_offsets": [0, 0]}
        if fault == 1:
            one["data_offsets"] = [n + rng.choice([-1, 1, 4]) for n in one["data_offsets"]]
        elif fault == 2 and said:
            one["data_offsets"] = rng.choice([*said.values()])["data_offsets"]
        elif fault == 3:
            data = data + bytes(3) if rng.random() < 0.5 else data[:-1]
        text = bytearray(json.dumps(said).encode())
        if fault == 4:
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(7)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        try:
            theirs = safetensors.torch.load(path.read_bytes())
        except Exception:
            refused += 1
            with pytest.raises(CheckpointError):
                oc.checkpoint.load(path)
        else:
            mine = oc.checkpoint.load(path)
            assert mine.keys() == theirs.keys() and all(bits(mine[n]) == bits(x) for n, x in theirs.items())
    assert 100 < refused < 300


def bits(x: Tensor) -> Any:
    return x.dtype, x.shape, x.reshape(-1).view(torch.uint8).tolist() if x.numel() else []


def test_a_box_of_nothing_has_nothing_in_common_with_others() -> None:
    assert not overlap([((0, 4), (0, 2)), ((2, 2), (0, 2)), ((4, 6), (0, 2))])
    assert overlap([((0, 4), (0, 2)), ((3, 6), (1, 2))])


@pytest.mark.parametrize("offset", [0, 63, 85])
def test_a_tensor_lies_within_the_data_of_its_file(offset: int) -> None:
    piece = FilePiece("a.safetensors", ((0, 4),), offset, 16, None)
    with pytest.raises(CheckpointError, match="do not lie within the data"):
        check_entry(
            Path("index.json"), "x", IndexEntry(torch.float32, (4,), (piece,)), {"a.safetensors": File(100, 64, None)}
        )


def parts_of(path: str) -> None:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    whole = torch.arange(64.0 * 64).reshape(64, 64)
    for where in (oc.Shard(0), oc.Shard(1)):
        part = oc.shard_tensor(torch.zeros(64, 64), mesh, [where])
        oc.load_state_dict({"x": part}, path, unexpected="ignore")
        assert torch.equal(oc.unshard(part), whole), where


def test_each_rank_reads_its_part_of_a_file_without_checksums(tmp_path: Path) -> None:
    given = {"before": torch.ones(7), "x": torch.arange(64.0 * 64).reshape(64, 64)}
    safetensors.torch.save_file(given, tmp_path / "model.safetensors")
    run_ranks(parts_of, 2, str(tmp_path / "model.safetensors"))
