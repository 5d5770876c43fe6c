"""shard_dataloader with a collate_fn that makes something of a batch as a whole. Twin: the plain DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from amounts import PROOF
from test_dataloader import MESH, rank
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import onecard as oc
from onecard.errors import DispatchError, LayoutError
from onecard.testing import multirank
from onecard.train.data.part import ReadBatch
from onecard.train.data.rows import are_of_the_whole

Samples = list[tuple[Tensor, Tensor, int]]


class Graphs(Dataset[Any]):
    """Nodes, edges and a class."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        g, nodes = torch.Generator().manual_seed(i), 2 + i % 3
        return torch.randn(nodes, 4, generator=g), torch.randint(nodes, (2, 3 + i % 2), generator=g), i % 3


@dataclass(frozen=True)
class Rows:
    """As many programs have their batches."""

    x: Tensor
    names: list[str]


class Pair(NamedTuple):
    """The same."""

    x: Tensor
    y: Tensor


def first(samples: Samples) -> Tensor:
    return torch.stack([x[0] for x, _, _ in samples])


def classes(samples: Samples) -> Tensor:
    return torch.tensor([c for _, _, c in samples])


def packed(samples: Samples) -> dict[str, Tensor]:
    """As torch_geometric does: nodes one after the other, edges counted on, the graph of each node."""
    sizes = torch.tensor([len(x) for x, _, _ in samples])
    before = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat([e + n for (_, e, _), n in zip(samples, before, strict=True)], 1)
    of = torch.arange(len(samples)).repeat_interleave(sizes)
    return {"x": torch.cat([x for x, _, _ in samples]), "edges": edges, "of": of, "y": classes(samples)}


def alike_packed(samples: Samples) -> dict[str, Tensor]:
    """Graphs of one size: parts have the same shapes on all ranks."""
    return packed([(x[:2], e[:, :3] % 2, c) for x, e, c in samples])


def centred(samples: Samples) -> tuple[Tensor, Tensor]:
    return first(samples) - first(samples).mean(0), classes(samples)


def numbered(samples: Samples) -> tuple[Tensor, Tensor]:
    return first(samples), torch.arange(len(samples))


def by_length(samples: Samples) -> tuple[Tensor, Tensor]:
    ordered = sorted(samples, key=lambda s: -len(s[0]))
    return first(ordered), torch.tensor([len(x) for x, _, _ in ordered])


def pairs(samples: Samples) -> Tensor:
    return first(samples)[:, None] - first(samples)


def with_counts(samples: Samples) -> tuple[Any, ...]:
    y = classes(samples)
    return first(samples), torch.bincount(y, minlength=3), len(samples), torch.tensor(len(samples))


def boxes(samples: Samples) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return first(samples), [{"boxes": x, "label": torch.tensor([c])} for x, _, c in samples]


def arrays(samples: Samples) -> dict[str, Any]:
    return {"x": first(samples).numpy(), "y": classes(samples)}


def fields(samples: Samples) -> Rows:
    return Rows(first(samples), [f"class {c}" for _, _, c in samples])


def named(samples: Samples) -> Pair:
    return Pair(first(samples), classes(samples))


COLLATES: list[Callable[[Samples], Any]] = [
    packed, alike_packed, centred, numbered, by_length, pairs, with_counts, boxes, arrays, fields, named,
]  # fmt: skip


def leaves(batch: Any) -> Iterator[Any]:
    """Tensors and numbers of a batch as one card has them; names belong to a rank's own rows."""
    if isinstance(batch, dict):
        batch = [*batch.values()]
    if isinstance(batch, Rows):
        batch = [batch.x]
    if isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    else:
        yield oc.unshard(batch) if isinstance(batch, Tensor) else batch


@multirank(2)
def test_batches_are_those_of_one_card() -> None:
    for collate in COLLATES:
        plain = DataLoader(Graphs(), 5, collate_fn=collate)
        loader = oc.shard_dataloader(DataLoader(Graphs(), 5, collate_fn=collate), MESH, "x")
        for found, wanted in zip(loader, plain, strict=True):
            assert type(found) is type(wanted)
            for mine, one in zip(leaves(found), leaves(wanted), strict=True):
                assert type(mine) is type(one), collate.__name__
                np.testing.assert_allclose(np.asarray(mine), np.asarray(one), atol=1e-6, err_msg=collate.__name__)
        whole = loader._sampler().whole
        assert whole == (collate not in (fields, named)), collate.__name__


class Scaled(DataLoader[Any]):
    """A class that changes batches as they come."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


class Together(Dataset[Any]):
    """Samples that are made for a batch."""

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.tensor([i, i - sum(indices) / len(indices)]) for i in indices]


@multirank(2)
def test_loaders_and_datasets_that_see_the_batch() -> None:
    for made in (lambda: Scaled(torch.arange(24.0).view(12, 2), 5), lambda: DataLoader(Together(), 5)):
        loader = oc.shard_dataloader(made(), MESH, "x")
        for _ in range(2):
            for found, wanted in zip(loader, made(), strict=True):
                assert found.placements == (oc.Shard(0),)
                torch.testing.assert_close(oc.unshard(found), wanted)


@multirank(2)
def test_mixed_by_chance_alike_on_all_ranks() -> None:
    """Rows are mixed with rows of the whole batch, by torch's numbers."""

    def mixed(samples: Samples) -> Tensor:
        return first(samples) + 100 * first(samples)[torch.randperm(len(samples))]

    torch.manual_seed(0)
    strangers = 0
    for batch, plain in zip(
        oc.shard_dataloader(DataLoader(Graphs(), 6, collate_fn=mixed), MESH, "x"),
        DataLoader(Graphs(), 6, collate_fn=first),
        strict=True,
    ):
        partner = torch.cdist((oc.unshard(batch) - plain) / 100, plain).argmin(1).tolist()
        assert sorted(partner) == [*range(6)]
        strangers += sum((i < 3) != (p < 3) for i, p in enumerate(partner))
    assert strangers > 0


@multirank(2)
def test_one_that_mixes_later_is_told() -> None:
    def sometimes(samples: Samples) -> tuple[Tensor, Tensor]:
        mixes = samples[0][2] == 1  # the second batch on
        return centred(samples) if mixes else (first(samples), classes(samples))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for found, wanted in zip(
            oc.shard_dataloader(DataLoader(Graphs(), 4, collate_fn=sometimes), MESH, "x"),
            DataLoader(Graphs(), 4, collate_fn=sometimes),
            strict=True,
        ):
            torch.testing.assert_close(oc.unshard(found[0]), wanted[0])
    assert [str(w.message).partition(" collate_fn")[0] for w in told] == ["shard_dataloader: of batch 2"]


@multirank(2)
def test_what_cannot_be_laid_out_is_said() -> None:
    """Sparse rows; and a number of the whole batch that each rank draws for itself."""
    sparse = DataLoader(Graphs(), 4, collate_fn=lambda samples: first(samples).to_sparse())
    with pytest.raises(DispatchError, match=r"a batch has a sparse_coo tensor, and distributed tensors are dense"):
        next(iter(oc.shard_dataloader(sparse, MESH, "x")))
    drawn = DataLoader(
        Graphs(), 4, collate_fn=lambda samples: {"x": first(samples), "scale": torch.tensor(3.0 + rank())}
    )
    with pytest.raises(LayoutError, match=r"(?s)tensors of different values of it.*the values are random"):
        next(iter(oc.shard_dataloader(drawn, MESH, "x")))


def test_samples_that_cannot_be_tried_are_left_alone() -> None:
    """A dataset that reads in its workers alone; one rank's part that is all."""

    def fails(samples: Samples) -> Any:
        raise OSError("opened in workers")

    loader = DataLoader(Graphs(), 4, collate_fn=fails)
    assert are_of_the_whole(loader, ReadBatch([0, 1, 2, 3], 0, 2, False))
    loader = DataLoader(Graphs(), 4, collate_fn=centred)
    assert are_of_the_whole(loader, ReadBatch([0, 1], 0, 2, False))
    assert not are_of_the_whole(loader, ReadBatch([0, 1, 2, 3], 0, 2, False))
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    loader = DataLoader(Graphs(), 4, collate_fn=lambda samples: torch.rand(len(samples)) + np.random.rand())
    are_of_the_whole(loader, ReadBatch([0, 1, 2, 3], 0, 2, False))
    assert torch.equal(torch.get_rng_state(), state[0]) and np.random.get_state()[1].tolist() == state[1]


if not PROOF:
    COLLATES = [c for c in COLLATES if c not in (by_length, pairs, packed)]
