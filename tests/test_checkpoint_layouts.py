"""Any layout to any layout, bit for bit: meshes of 1 to 8 ranks, uneven, several axes on one dim, stages, ZeRO, merged dims."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import amount, share
from torch import Tensor, nn

import onecard as oc
from onecard.checkpoint.format.pieces import plan, sources_of
from onecard.place.layout import Layout
from onecard.place.parts import Part
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec, contiguous_stride
from onecard.testing import multirank

PAIRS, A_SAVE = amount(75, 300), 15
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64,
          torch.complex128, torch.float8_e4m3fn, torch.uint16]  # fmt: skip


def random_mesh(rng: random.Random, world: int) -> oc.ProcessMesh:
    """Some of the ranks, in any order, in up to three axes: a stage of a pipeline, or all."""
    size = rng.randint(1, world)
    shapes = [s for s in itertools.product(range(1, size + 1), repeat=3) if s[0] * s[1] * s[2] == size]
    shape = [n for n in rng.choice(shapes) if n > 1] or [1]
    ranks = rng.sample(range(world), size)
    return oc.ProcessMesh(torch.tensor(ranks).view(shape), [f"a{i}" for i in range(len(shape))])


def random_layout(rng: random.Random, mesh: oc.ProcessMesh, shape: tuple[int, ...]) -> Layout:
    dims: list[list[int]] = [[] for _ in shape]
    for axis in rng.sample(range(mesh.ndim), mesh.ndim):  # in any order: several axes on one dim
        if shape and rng.random() < 0.8:
            dims[rng.randrange(len(shape))].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)))


def lay_out(whole: Tensor, layout: Layout) -> Tensor:
    """A whole tensor under a layout, made without a message and without the code under test."""
    spec = Spec.make(layout, whole.shape, contiguous_stride(whole.shape), whole.dtype, whole.device)
    return wrap(layout.local_part(whole).clone() if spec.here else whole.new_empty(0), spec)


def random_whole(rng: random.Random, number: int) -> Tensor:
    shape = tuple(rng.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(rng.randint(0, 3)))
    bits = torch.randint(0, 2, (*shape, 16 * 8), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
    dtype = rng.choice(DTYPES)
    if dtype == torch.bool:
        return bits[..., 0].bool()
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    data = (bits.view(*shape, 16, 8) * weights).sum(-1, dtype=torch.uint8)[..., : dtype.itemsize]
    return data.contiguous().view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (a, b))
    return torch.equal(a, b)


@pytest.mark.proof
@multirank(8)
def test_random_pairs(tmp_path: Path) -> None:
    rng = random.Random(16)
    rank, world = oc.get_rank(), oc.get_world_size()
    for save in range(PAIRS // A_SAVE):
        cases = {}
        for number in range(A_SAVE):
            whole = random_whole(rng, save * A_SAVE + number)
            source, target = (random_layout(rng, random_mesh(rng, world), tuple(whole.shape)) for _ in range(2))
            cases[f"t{number}"] = (whole, source, target)
        folder = tmp_path / f"save{save}"
        oc.save_state_dict({name: lay_out(whole, source) for name, (whole, source, _) in cases.items()}, folder)
        blank = {name: lay_out(whole ^ whole if whole.dtype == torch.bool else torch.zeros_like(whole), target)
                 for name, (whole, _, target) in cases.items()}  # fmt: skip
        oc.load_state_dict(blank, folder)
        for name, (whole, source, target) in cases.items():
            if rank in target.mesh:
                assert same_bits(blank[name].to_local(), target.local_part(whole)), (save, name, source, target)
        if save % 4 == 0 and rank == 0:
            assert oc.checkpoint.verify(folder) == []


def test_every_element_is_written_once_and_replicas_share() -> None:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    big = torch.empty(0)
    sources = {}
    for name, placements in {"w": [oc.Replicate(), oc.Shard(0)], "b": [oc.Replicate(), oc.Replicate()]}.items():
        layout = Layout.of(mesh, 2, placements)
        spec = Spec.make(layout, torch.Size((4096, 4096)), (4096, 1), torch.float32, torch.device("cpu"))
        sources |= sources_of({name: wrap(big, spec)})
    shares = plan(sources, 4)
    load = [sum(s.nbytes for s in shares if s.rank == rank) for rank in range(4)]
    assert sum(load) == 2 * 4096 * 4096 * 4 and max(load) == min(load), load


@multirank(2)
def test_pending_and_merged(tmp_path: Path) -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    pending = oc.from_local(torch.full((3, 2), 1.5), mesh, [oc.Partial()])
    merged_layout = Layout.make(mesh, (((Part(3, ()), Part(4, (0,)))), ()))
    whole = torch.arange(24.0).view(12, 2)
    oc.save_state_dict({"p": pending, "m": lay_out(whole, merged_layout)}, tmp_path / "a")
    into = {
        "p": oc.from_local(torch.full((3, 2), 9.0), mesh, [oc.Partial()]),
        "m": lay_out(torch.zeros(12, 2), merged_layout),
    }
    oc.load_state_dict(into, tmp_path / "a")
    assert torch.equal(into["p"].full_tensor(), torch.full((3, 2), 3.0))
    assert torch.equal(into["m"].full_tensor(), whole)
    plain = oc.checkpoint.load(tmp_path / "a")
    assert torch.equal(plain["m"], whole)


# training: 10 steps, save, 10 more under another layout; against 20 steps of one card


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(11, 12), nn.Linear(12, 30)
        self.second, self.head = nn.Linear(30, 12), nn.Linear(12, 11, bias=False)
        self.head.weight = self.table.weight  # tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = torch.relu(self.first(there(x, self.first)))
        return self.head(there(there(x, self.second) + self.second(y), self.head))


def there(x: Tensor, layer: nn.Module) -> Tensor:
    """To the stage of a layer."""
    mesh = getattr(layer.weight, "mesh", None)
    return x if mesh is None or mesh == x.mesh else oc.reshard(x, mesh, [oc.Replicate()])  # type: ignore[attr-defined]


def tensor_parallel(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    axis = mesh.axis("tp")
    for part, dim in (("first.weight", 0), ("first.bias", 0), ("second.weight", 1)):
        if isinstance(layer, Net):
            inner, key = part.split(".")
            placements = [oc.Shard(dim) if a == axis else oc.Replicate() for a in range(mesh.ndim)]
            owner = getattr(layer, inner)
            setattr(owner, key, oc.shard_tensor(getattr(owner, key), mesh, placements))


def fully_sharded(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    for key, value in list(layer.named_parameters(recurse=False)):
        if not isinstance(value, oc.DistTensor) and value.shape[0] > 3:
            setattr(layer, key, oc.shard_tensor(value, mesh, [oc.Shard(0)] + [oc.Replicate()] * (mesh.ndim - 1)))


def stages(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    """A pipeline by marks: table and head on rank 0, what is between on rank 1."""
    for key, value in list(layer.named_parameters(recurse=False)):
        where = oc.ProcessMesh([1 if name in ("first", "second") else 0], ["stage"])
        setattr(layer, key, oc.shard_tensor(value, where, [oc.Replicate()]))


def cut_states(key: str, param: Any, state: Any) -> Any:
    return oc.reshard(state, state.mesh, [oc.Shard(0)] + [oc.Replicate()] * (state.mesh.ndim - 1))


def make(kind: str) -> dict[str, Any]:
    """A model, its optimizer and scheduler: on one card or divided over two ranks, in several ways."""
    torch.manual_seed(0)
    net: nn.Module = Net()
    pair = oc.ProcessMesh([0, 1], ["tp"])
    cuts = {"tp": tensor_parallel, "zero3": fully_sharded, "pp": stages}
    levels = {"ShardingStage1": oc.ShardingStage1, "ShardingStage3": oc.ShardingStage3, "zero1": lambda: cut_states}
    if kind != "one":
        net = oc.shard_layer(net, pair, cuts.get(kind))
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    if kind != "one":
        optimizer = oc.shard_optimizer(optimizer, levels[kind]() if kind in levels else None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        ids = torch.randint(11, (6, 4), generator=torch.Generator().manual_seed(state["step"]))
        loss = nn.functional.cross_entropy(state["model"](ids).flatten(0, 1), ids.flatten().roll(1))
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1
        losses.append(oc.unshard(loss.detach()).item())
    return losses


# each of the first four to each other, and the others from and to two of them
PAIRS_OF_LAYOUTS = [
    *itertools.permutations(["one", "tp", "ShardingStage3", "pp"], 2),
    *(pair for kind in ("zero1", "zero3", "ShardingStage1") for other in ("one", "tp")
      for pair in ((kind, other), (other, kind))),
]  # fmt: skip


def one_card() -> list[float]:
    return train(make("one"), 20)


@pytest.mark.proof
@multirank(2)
def test_training_goes_on_under_another_layout() -> None:
    expected = one_card()
    with tempfile.TemporaryDirectory() as mine:
        where = [mine]
        torch.distributed.broadcast_object_list(where)
        for number, (first, second) in enumerate(share(PAIRS_OF_LAYOUTS, 3)):
            state = make(first)
            losses = train(state, 10)
            folder = Path(where[0]) / str(number)
            oc.checkpoint.save(state, folder)
            again = oc.checkpoint.load(folder, make(second))
            assert again["step"] == 10 and again["optimizer"].param_groups[0]["lr"] != 0.01
            losses += train(again, 10)
            assert losses == pytest.approx(expected, rel=1e-5), (first, second)
            for p, state_of in again["optimizer"].state.items():
                if second in ("zero1", "ShardingStage1"):
                    assert state_of["exp_avg"].placements == (oc.Shard(0),)
                elif second != "one":
                    assert state_of["exp_avg"].placements == p.placements
