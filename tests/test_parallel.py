"""shard_layer, shard_op, shard_dataloader: what is laid out how, and who reads what. Twin: plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import onecard as oc
from onecard.errors import LayoutError, MeshError
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
MESH_4 = oc.ProcessMesh([0, 1, 2, 3], ["dp"])
MESH_2D = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
ONE = oc.ProcessMesh([0], ["x"])


# shard_layer


class Net(nn.Module):
    """Two linear layers with tied weights, a buffer that two modules share, and a parameter that is absent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(4, 6, bias=False)
        self.down.weight = self.up.weight
        self.norm = nn.BatchNorm1d(6)
        table = torch.arange(6.0)
        self.up.register_buffer("table", table)
        self.norm.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x) + self.down(x) * self.up.table)


def cut_weight(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])


@multirank(2)
def test_shard_layer() -> None:
    plain = Net()
    twin = copy.deepcopy(plain)
    called: list[tuple[str, str, Any]] = []

    def shard_fn(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        called.append((name, type(layer).__name__, mesh))
        cut_weight(name, layer, mesh)

    assert oc.shard_layer(twin, MESH, shard_fn) is twin
    assert called == [
        ("", "Net", MESH), ("up", "Linear", MESH), ("down", "Linear", MESH), ("norm", "BatchNorm1d", MESH),
    ]  # fmt: skip
    assert isinstance(twin.up.weight, nn.Parameter) and twin.up.weight.placements == (oc.Shard(0),)
    assert twin.up.weight.to_local().shape == (3, 4)
    assert isinstance(twin.up.bias, nn.Parameter) and twin.up.bias.placements == (oc.Replicate(),)
    assert twin.norm.running_mean.placements == twin.norm.num_batches_tracked.placements == (oc.Replicate(),)
    x = torch.randn(5, 4)
    for model, data in ((plain, x), (twin, oc.shard_tensor(x, MESH, [oc.Replicate()]))):
        (model(data) ** 3).sum().backward()
    assert list(twin.state_dict()) == list(plain.state_dict())
    assert_close(twin.state_dict(), plain.state_dict())  # running statistics included
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, atol=1e-4)


@multirank(2)
def test_what_is_shared_stays_shared() -> None:
    for shard_fn in (None, cut_weight):
        twin = oc.shard_layer(Net(), MESH, shard_fn)
        assert twin.down.weight is twin.up.weight
        assert twin.norm.table is twin.up.table
        assert len(list(twin.parameters())) == len(list(Net().parameters())) == 4
        twin.up.table.add_(1)
        assert_close(twin.norm.table, torch.arange(1.0, 7.0))


def test_requires_grad_and_dtype_are_kept() -> None:
    layer = nn.Linear(2, 2).to(torch.float64)
    layer.bias.requires_grad_(False)
    twin = oc.shard_layer(layer, ONE)
    assert twin.weight.requires_grad and not twin.bias.requires_grad
    assert twin.weight.dtype is torch.float64
    weight = twin.weight
    assert oc.shard_layer(twin, ONE).weight is weight  # again: nothing left to do


@multirank(2)
def test_input_and_output_functions() -> None:
    plain = nn.Linear(4, 3)
    nn.init.constant_(plain.weight, 0.5)
    nn.init.constant_(plain.bias, 1.0)

    def cut(inputs: tuple[Any, ...], mesh: oc.ProcessMesh) -> tuple[Any, ...]:
        assert mesh is MESH and len(inputs) == 1
        return (oc.shard_tensor(inputs[0], mesh, [oc.Shard(0)]),)

    def whole(outputs: Any, mesh: oc.ProcessMesh) -> Any:
        assert outputs.placements == (oc.Shard(0),)
        return oc.reshard(outputs, mesh, [oc.Replicate()])

    twin = oc.shard_layer(copy.deepcopy(plain), MESH, input_fn=cut, output_fn=whole)
    x = torch.randn(5, 4)
    out = twin(x)
    assert out.placements == (oc.Replicate(),)
    assert_close(out, plain(x))
    # What is not a tuple is the only input.
    twin = oc.shard_layer(copy.deepcopy(plain), MESH, input_fn=lambda inputs, mesh: inputs[0] * 2)
    assert_close(twin(x), plain(x * 2))


# shard_op


def matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator), torch.randn(6, 5, generator=generator)


@multirank(2)
def test_shard_op_lays_out_inputs_and_outputs() -> None:
    a, b = matrices()
    expected = a @ b
    cuts = oc.shard_op(torch.matmul, MESH, [[oc.Shard(1)], [oc.Shard(0)]])
    assert cuts(a, b).placements == (oc.Partial(),)
    assert_close(cuts(a, b), expected)
    result = oc.shard_op(torch.matmul, MESH, [[oc.Shard(1)], [oc.Shard(0)]], [oc.Shard(1)])(a, b)
    assert result.placements == (oc.Shard(1),)
    assert_close(result, expected)
    # Left out: plain tensors are replicated, distributed ones stay as they are.
    as_they_are = oc.shard_op(torch.matmul, MESH)(oc.shard_tensor(a, MESH, [oc.Shard(0)]), b)
    assert as_they_are.placements == (oc.Shard(0),)
    assert_close(as_they_are, expected)


@multirank(2)
def test_shard_op_with_dims_mappings() -> None:
    a, b = matrices()
    columns = oc.shard_op(torch.matmul, MESH, [[None, None], [None, "x"]])(a, b)
    assert columns.placements == (oc.Shard(1),)
    rows = oc.shard_op(torch.matmul, MESH, [["x", None], None], ["x", None])(a, b)
    assert rows.placements == (oc.Shard(0),)
    whole = oc.shard_op(torch.matmul, MESH, [["x", None], None], [[None, None]])(a, b)
    assert whole.placements == (oc.Replicate(),)
    for result in (columns, rows, whole):
        assert_close(result, a @ b)


@multirank(2)
def test_shard_op_is_differentiable_and_takes_modules_and_other_arguments() -> None:
    a, b = (x.requires_grad_() for x in matrices())
    (a @ b).square().sum().backward()
    expected = [a.grad, b.grad]
    a.grad = b.grad = None
    oc.shard_op(torch.matmul, MESH, [[oc.Shard(0)], [oc.Shard(1)]], [oc.Replicate()])(a, b).square().sum().backward()
    assert_close([a.grad, b.grad], expected)
    assert not isinstance(a.grad, oc.DistTensor)

    layer = nn.Linear(6, 3)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.zeros_(layer.bias)
    x = a.detach()
    assert_close(oc.shard_op(layer, MESH, [[oc.Shard(0)]])(x), layer(x).detach())
    # Placements count tensors: numbers and keywords pass through.
    summed = oc.shard_op(torch.sum, MESH, [[oc.Shard(0)]])(x, 1, keepdim=True)
    assert_close(summed, x.sum(1, keepdim=True))
    values, indices = oc.shard_op(torch.topk, MESH, [[oc.Shard(0)]], [[oc.Replicate()], None])(x, 2)
    assert values.placements == (oc.Replicate(),) and indices.placements == (oc.Shard(0),)
    assert_close([values, indices], list(x.topk(2)))


def test_shard_op_says_what_does_not_fit() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    whole = [oc.Replicate()]
    with pytest.raises(LayoutError, match=r"3 entries in in_placements for 2 tensor\(s\); give one for each, None"):
        oc.shard_op(torch.matmul, ONE, [whole, whole, whole])(a, b)
    with pytest.raises(LayoutError, match=r"1 entries in in_placements for 2 tensor\(s\)"):
        oc.shard_op(torch.matmul, ONE, [whole])(a, b)
    with pytest.raises(LayoutError, match=r"2 entries in out_placements for 1 tensor\(s\)"):
        oc.shard_op(torch.matmul, ONE, None, [whole, whole])(a, b)
    with pytest.raises(LayoutError, match=r"2 placement\(s\).*mesh with 1 axes"):
        oc.shard_op(torch.matmul, ONE, [[oc.Shard(0), oc.Shard(1)], whole])(a, b)
    with pytest.raises(MeshError, match=r"has no axis 'tp'"):
        oc.shard_op(torch.matmul, ONE, [["tp", None], None])(a, b)


# shard_dataloader


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


@pytest.mark.parametrize(("kind", "num_workers"), [("global", 0), ("global", 1), ("generator", 0), ("weighted", 0)])
@multirank(4)
def test_shuffled_batches_are_those_of_one_card(kind: str, num_workers: int) -> None:
    torch.manual_seed(5)
    expected = list(loaders(kind, 0))
    after = torch.get_rng_state()
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
    # One number for a whole batch cannot be made from a part of it.
    with pytest.raises(RuntimeError, match=r"a batch of 8 samples gave this rank a tensor of \[2\], not \[4\].*stack"):
        next(iter(oc.shard_dataloader(DataLoader(Squares(), batch_size=8, collate_fn=sums), MESH, "x")))


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
