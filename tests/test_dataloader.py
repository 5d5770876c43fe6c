"""shard_dataloader: who reads what, and which batches come out. Twin: the plain DataLoader."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import onecard as oc
from onecard.errors import LayoutError, MeshError
from onecard.testing import RankError, assert_close, multirank, run_ranks

MESH = oc.ProcessMesh([0, 1], ["x"])
MESH_4 = oc.ProcessMesh([0, 1, 2, 3], ["dp"])
MESH_2D = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
ONE = oc.ProcessMesh([0], ["x"])


class Squares(Dataset[tuple[Tensor, int]]):
    """A sample is (row, label); counts what is read in this process."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.read: list[int] = []

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.append(i)
        return torch.tensor([i, i * i], dtype=torch.float32), i % 3

    def __len__(self) -> int:
        return self.size


class Named(Squares):
    """The same as a dict."""

    def __getitem__(self, i: int) -> dict[str, Any]:  # type: ignore[override]
        row, label = super().__getitem__(i)
        return {"label": label, "row": row, "name": f"sample {i}"}


def assert_same_batches(loader: Any, plain: Any, passes: int = 2) -> None:
    """Whole values are those of one card; and a second pass is like the first."""
    for _ in range(passes):
        ours, theirs = list(loader), list(plain)
        assert len(ours) == len(theirs) == len(loader)
        for batch, expected in zip(ours, theirs, strict=True):
            assert type(batch) is (oc.DistTensor if isinstance(expected, Tensor) else type(expected))
            assert_close(batch, expected)


def rank() -> int:
    return torch.distributed.get_rank()


def workers(number: int) -> dict[str, Any]:
    """Options for a loader with workers. A rank of a test comes from a fork server, and its workers would, slowly."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


@pytest.mark.parametrize("num_workers", [0, 1])
@multirank(2)
def test_a_tuple_is_cut_and_read_in_parts(num_workers: int) -> None:
    """Ten samples in batches of four: the last batch has two."""
    data = Squares()
    loader = oc.shard_dataloader(DataLoader(data, batch_size=4, **workers(num_workers)), MESH, shard_dims="x")
    rows, labels = next(loader())  # as Paddle calls it
    assert rows.shape == (4, 2) and rows.placements == labels.placements == (oc.Shard(0),)
    assert rows.to_local()[:, 0].tolist() == [[0, 1], [2, 3]][rank()]
    assert labels.dtype is torch.int64
    data.read.clear()
    assert_same_batches(loader, DataLoader(Squares(), batch_size=4), passes=1)
    if num_workers == 0:
        assert data.read == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]][rank()]
    assert len(loader) == 3 and loader.batch_size == 4 and loader.dataset is data


@multirank(4)
def test_batches_that_do_not_divide() -> None:
    """Batches of 6, 6 and 1 on four ranks: parts of 2, 2, 2, 0 and of 1, 0, 0, 0."""
    data = Squares(13)
    loader = oc.shard_dataloader(DataLoader(data, batch_size=6), MESH_4, shard_dims=0)
    sizes = [len(rows.to_local()) for rows, _ in loader]
    assert sizes == [[2, 2, 1], [2, 2, 0], [2, 2, 0], [0, 0, 0]][rank()]
    # A rank with an empty part reads one sample to learn its shape.
    assert len(data.read) == [5, 5, 5, 3][rank()]
    assert_same_batches(loader, DataLoader(Squares(13), batch_size=6))
    dropping = oc.shard_dataloader(DataLoader(data, batch_size=6, drop_last=True), MESH_4, shard_dims=0)
    assert_same_batches(dropping, DataLoader(Squares(13), batch_size=6, drop_last=True))
    # The loss of the uneven batch is that of one card.
    for (rows, _), (expected, _) in zip(loader, DataLoader(Squares(13), batch_size=6), strict=True):
        assert_close(rows.mean(), expected.mean())


@multirank(2)
def test_dicts_and_plain_tensors() -> None:
    loader = oc.shard_dataloader(DataLoader(Named(), batch_size=3), MESH, shard_dims="x")
    plain = DataLoader(Named(), batch_size=3)
    for batch, expected in zip(loader, plain, strict=True):
        assert list(batch) == list(expected)
        assert batch["row"].placements == batch["label"].placements == (oc.Shard(0),)
        assert_close([batch["row"], batch["label"]], [expected["row"], expected["label"]])
    whole = oc.shard_dataloader(DataLoader(torch.arange(7.0), batch_size=3), MESH, shard_dims="x")
    assert_same_batches(whole, DataLoader(torch.arange(7.0), batch_size=3))
    nested = TensorDataset(torch.arange(6.0), torch.arange(12.0).view(6, 2))
    assert_same_batches(
        oc.shard_dataloader(DataLoader(nested, batch_size=4), MESH, "x"), DataLoader(nested, batch_size=4)
    )


@multirank(4)
def test_one_mesh_for_each_entry() -> None:
    """Rows go to ranks 0 and 1, cut; labels to ranks 2 and 3, whole: the first and the last stage of a pipeline."""
    first, last = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2, 3], ["x"])
    meshes = [first, last]
    loader = oc.shard_dataloader(
        DataLoader(Named(), batch_size=4), meshes, shard_dims=["x", None], input_keys=["row", "label"]
    )
    for batch, expected in zip(loader, DataLoader(Named(), batch_size=4), strict=True):
        assert batch["row"].mesh is first and batch["row"].placements == (oc.Shard(0),)
        assert batch["label"].mesh is last and batch["label"].placements == (oc.Replicate(),)
        assert batch["row"].to_local().numel() == (4 if rank() < 2 and len(expected["row"]) == 4 else 2 * (rank() < 2))
        assert_close([batch["row"], batch["label"]], [expected["row"], expected["label"]])
    pairs = oc.shard_dataloader(DataLoader(Squares(), batch_size=4), meshes, shard_dims="x")
    rows, labels = next(iter(pairs))
    assert rows.mesh is first and labels.mesh is last and labels.placements == (oc.Shard(0),)


@multirank(2)
def test_keys_that_a_batch_lacks() -> None:
    loader = oc.shard_dataloader(DataLoader(Named(), batch_size=4), MESH, "x", input_keys=["row", "mask"])
    with pytest.raises(LayoutError, match=r"input_keys \['mask'\] are not in the batch \['label', 'row', 'name'\]"):
        next(iter(loader))


def test_axes_that_do_not_fit() -> None:
    with pytest.raises(LayoutError, match=r"2 shard_dims for 1 mesh\(es\); give one for each mesh"):
        oc.shard_dataloader(DataLoader(Squares()), ONE, shard_dims=["x", "x"])
    with pytest.raises(MeshError, match="has no axis 'dp'"):
        oc.shard_dataloader(DataLoader(Squares()), ONE, shard_dims="dp")


@multirank(2)
def test_nothing_is_cut_without_an_axis() -> None:
    data = Squares()
    loader = oc.shard_dataloader(DataLoader(data, batch_size=4), MESH)
    for rows, _ in loader:
        assert rows.placements == (oc.Replicate(),)
    assert len(data.read) == [10, 0][rank()]  # the others get it from the first
    assert_same_batches(loader, DataLoader(Squares(), batch_size=4))


class Noise(Dataset[Tensor]):
    """Samples from generators that nobody seeds: each rank would draw others."""

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([float(i), np.random.default_rng().random(), torch.rand(()).item()])

    def __len__(self) -> int:
        return 7


@pytest.mark.share(1)
@pytest.mark.parametrize("num_workers", [0, 1])
@multirank(4)
def test_ranks_along_other_axes_get_equal_data(num_workers: int) -> None:
    torch.manual_seed(rank())
    loader = oc.shard_dataloader(DataLoader(Noise(), batch_size=4, **workers(num_workers)), MESH_2D, shard_dims="dp")
    batches = list(loader)
    for batch in batches:
        assert batch.placements == (oc.Shard(0), oc.Replicate())
        # One value for each position, on all four ranks: gathered along dp, it must be equal along tp.
        whole = batch.full_tensor()
        everyone = [torch.empty_like(whole) for _ in range(4)]
        torch.distributed.all_gather(everyone, whole)
        assert all(torch.equal(whole, other) for other in everyone)
    assert [int(x) for batch in batches for x in batch.full_tensor()[:, 0]] == list(range(7))


def loaders(kind: str, num_workers: int) -> DataLoader:
    if kind == "weighted":
        return DataLoader(Squares(), 4, sampler=WeightedRandomSampler([float(i + 1) for i in range(10)], 10))
    generator = torch.Generator().manual_seed(3) if kind == "generator" else None
    return DataLoader(Squares(), 4, shuffle=True, generator=generator, **workers(num_workers))


@pytest.mark.share(1)
@pytest.mark.parametrize(("kind", "num_workers"), [("global", 0), ("global", 1), ("generator", 0), ("weighted", 0)])
@multirank(4)
def test_shuffled_batches_are_those_of_one_card(kind: str, num_workers: int) -> None:
    torch.manual_seed(5)
    expected = list(loaders(kind, 0))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    uncut = oc.shard_dataloader(loaders(kind, num_workers), MESH_2D)
    for batch, whole in zip(uncut, expected, strict=True):
        assert_close(batch, whole)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(5)
    loader = oc.shard_dataloader(loaders(kind, num_workers), MESH_2D, shard_dims="dp")
    first = list(loader)
    assert torch.equal(torch.get_rng_state(), after)  # and the program goes on with the same numbers
    for batch, whole in zip(first, expected, strict=True):
        assert_close(batch, whole)
    if num_workers == 0:
        order, again = ([oc.unshard(rows)[:, 0] for rows, _ in batches] for batches in (first, loader))
        assert not torch.equal(torch.cat(order), torch.cat(again)), "shuffled once only"


@multirank(4)
def test_a_dataset_that_draws_leaves_the_ranks_in_step() -> None:
    """Dropout draws the whole mask on every rank, so all must have drawn alike before it, whatever each has read."""
    torch.manual_seed(0)
    loader = oc.shard_dataloader(DataLoader(Noise(), batch_size=4, shuffle=True), MESH_2D, shard_dims="dp")
    seen = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch.full_tensor()[:, 2])
            state = torch.get_rng_state()
            everyone = [torch.empty_like(state) for _ in range(4)]
            torch.distributed.all_gather(everyone, state)
            assert all(torch.equal(state, other) for other in everyone)
            torch.rand(3)
    drawn = torch.cat(seen)
    assert len(drawn.unique()) == len(drawn) == 14  # no sample's numbers come twice, on no rank and in no pass


class Stream(IterableDataset[Tensor]):
    """Samples that cannot be read by index."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(14.0).view(7, 2).unbind())


@multirank(4)
def test_iterable_dataset() -> None:
    loader = oc.shard_dataloader(DataLoader(Stream(), batch_size=4), MESH_2D, shard_dims="dp")
    batches, expected = list(loader), list(DataLoader(Stream(), batch_size=4))
    assert len(batches) == 2
    for batch, whole in zip(batches, expected, strict=True):
        assert batch.placements == (oc.Shard(0), oc.Replicate())
        assert_close(batch, whole)


@multirank(2)
def test_passes_do_not_disturb_each_other() -> None:
    """Two iterators at once, and one left half-way whose worker has read ahead, over batches of different sizes."""
    loader = oc.shard_dataloader(DataLoader(Squares(), batch_size=4, **workers(1)), MESH, "x")
    expected = [labels for _, labels in DataLoader(Squares(), batch_size=4)]
    left = iter(loader)
    next(left)
    for i, ((_, a), (_, b)) in enumerate(zip(loader, loader, strict=True)):
        assert_close([a, b], [expected[i], expected[i]])
    assert_close(next(left)[1], expected[1])


@multirank(2)
def test_collate_functions() -> None:
    def sums(samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.stack([row for row, _ in samples]).sum(0)

    def stacked(samples: list[tuple[Tensor, int]]) -> Tensor:
        return torch.stack([row * 2 for row, _ in samples])

    loader = DataLoader(Squares(), batch_size=4, collate_fn=stacked)
    assert_same_batches(oc.shard_dataloader(loader, MESH, "x"), loader)
    loader = DataLoader(Squares(), batch_size=8, collate_fn=sums)
    assert_same_batches(oc.shard_dataloader(loader, MESH, "x"), loader)


@multirank(3)
def test_ranks_outside_the_mesh_go_along() -> None:
    loader = oc.shard_dataloader(DataLoader(Squares(), batch_size=4), MESH, "x")
    total = 0
    for rows, _ in loader:
        total += rows.shape[0]
        assert rows.shape[1] == 2
    assert total == 10


def trained(loader: Any, model: nn.Module) -> list[float]:
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    losses = []
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows / 100), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@multirank(4)
def test_training_through_it_on_two_axes() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))

    def cut(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        if name == "0":
            layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Replicate(), oc.Shard(0)])

    twin = oc.shard_layer(copy.deepcopy(plain), MESH_2D, cut)
    loader = DataLoader(Squares(), batch_size=3)
    expected = trained(loader, plain)
    assert trained(oc.shard_dataloader(loader, MESH_2D, "dp"), twin) == pytest.approx(expected, rel=1e-5)
    assert_close(twin.state_dict(), plain.state_dict())


# ---- ranks that shuffle differently


class Turned:
    """A sampler of one's own: the first batch is the same on all ranks, later ones are not."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2 + rank(), 3 - rank()]])

    def __len__(self) -> int:
        return 2


def shuffled(kind: str) -> int:
    """How many batches the ranks read."""
    torch.manual_seed(7 + rank())  # the fault
    if kind == "as for DDP":
        sampler: Any = DistributedSampler(Squares(), 2, rank(), shuffle=False)
        return len(list(oc.shard_dataloader(DataLoader(Squares(), batch_size=4, sampler=sampler), MESH, "x")))
    if kind == "own":
        return len(list(oc.shard_dataloader(DataLoader(Squares(), batch_sampler=Turned()), MESH, "x")))
    generator = torch.Generator().manual_seed(3) if kind == "one generator" else None
    loader = DataLoader(Squares(), batch_size=4, shuffle=kind != "in order", generator=generator)
    if kind == "two stages":
        meshes = [oc.ProcessMesh([0], ["x"]), oc.ProcessMesh([1], ["x"])]
        return len(list(oc.shard_dataloader(loader, meshes)))
    return len(list(oc.shard_dataloader(loader, MESH, "x")))


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("seeds", r"rank \d: begins with samples \[\d, \d, \d, \d\] \(seed [78]\)"),
        ("as for DDP", r"rank \d: begins with samples \[[01], [23], [45], [67]\]"),
        ("own", r"rank \d: has read 2 batches in another order"),
        ("two stages", r"rank \d: shuffles with a generator in another state \(seed [78]\)"),
    ],
    ids=lambda value: value if "\\" not in value else "",
)
def test_ranks_that_shuffle_differently_are_named(kind: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(shuffled, 2, kind)
    text = str(caught.value)
    assert "CommunicationError: shard_dataloader: the ranks do not read the same samples in pass 1 over Squares" in text
    assert len(re.findall(f"  {words}", text)) >= 2
    assert "torch.manual_seed(0)" in text and "generator=torch.Generator().manual_seed(0)" in text
    assert "no DistributedSampler" in text


@pytest.mark.parametrize("kind", ["in order", "one generator"])
def test_seeds_that_decide_no_order_may_differ(kind: str) -> None:
    assert run_ranks(shuffled, 2, kind) == [3, 3]


@pytest.mark.parametrize("whole", [False, True])
def test_batches_stay_on_the_device_where_they_are(monkeypatch, whole):
    """A program that never names a device is the CPU's, also on a machine whose ranks have GPUs."""
    monkeypatch.setattr("onecard.comm.world.world.device", lambda: torch.device("cuda", 0))
    mesh = oc.ProcessMesh([0], ["dp"])
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
    given = oc.shard_dataloader(loader, mesh) if whole else oc.shard_dataloader(loader, mesh, "dp")
    parts = [x for (x,) in given]
    assert [x.device.type for x in parts] == [x.to_local().device.type for x in parts] == ["cpu"] * 2
    assert torch.cat([x.full_tensor() for x in parts]).tolist() == list(range(8))
    assert oc.shard_tensor(torch.ones(2), mesh, [oc.Shard(0)]).device.type == "cpu"
