"""shard_dataloader with a collate_fn that pads to the longest sample of a batch. Twin: the plain DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dataloader import MESH, MESH_2D, rank, workers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank


def padded(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Sentences(Dataset[Any]):
    """Samples of 1 to 9 elements, or of lengths drawn by a function."""

    def __init__(self, drawn: Callable[[], int] | None = None) -> None:
        self.drawn, self.read = drawn, 0

    def __getitem__(self, i: int) -> tuple[Tensor, str]:
        self.read += 1
        return torch.full((i + 1 if self.drawn is None else self.drawn(),), i + 1), f"sentence {i}"

    def __len__(self) -> int:
        return 9


def padded_with_names(samples: list[tuple[Tensor, str]]) -> dict[str, Any]:
    return {"x": padded([x for x, _ in samples]), "name": [name for _, name in samples]}


@multirank(4)
def test_padding_by_batch() -> None:
    """Each rank's rows are as long as the longest of the whole batch, with all that a rank reads ahead, to the last row."""
    data = Sentences()
    plain = [*DataLoader(data, batch_size=4, collate_fn=padded_with_names)]
    for number in (0, 1):
        data.read = 0
        loader = oc.shard_dataloader(
            DataLoader(data, batch_size=4, collate_fn=padded_with_names, **workers(number)), MESH_2D, "dp"
        )
        for turn in range(2):
            for batch, whole in zip(loader, plain, strict=True):
                assert batch["x"].shape == whole["x"].shape and batch["x"].placements == (oc.Shard(0), oc.Replicate())
                assert_close(batch["x"], whole["x"])
                half = (len(whole["name"]) + 1) // 2
                assert batch["name"] == (whole["name"][:half] if rank() < 2 else whole["name"][half:])
            # The first batch in parts, whole to compare it, and all of them.
            reads = {(0, 0): 2 + 4 + 9, (0, 1): 2 + 4 + 9 + 9}.get((number, turn))
            assert reads is None or data.read == (reads if rank() % 2 == 0 else 0)


@multirank(4)
def test_parts_that_are_as_long_are_read_apart() -> None:
    data: Any = [torch.ones(5, dtype=torch.int64)] * 8
    even = DataLoader(data, batch_size=4, collate_fn=padded)
    with oc.explain() as report:
        batches = list(oc.shard_dataloader(even, MESH_2D, shard_dims="dp"))
    assert_close(batches, list(even))
    assert [m.operand for m in report.messages if m.step.kind == "all_reduce"] == ["shapes"] * 2


@multirank(2)
def test_random_lengths() -> None:
    """Drawn by torch's generator they are the same on all ranks; drawn by one that is not they are refused."""
    torch.manual_seed(0)
    drawn = Sentences(lambda: int(torch.randint(1, 50, ())))
    for batch in oc.shard_dataloader(DataLoader(drawn, 4, collate_fn=padded_with_names), MESH, "x"):
        assert batch["x"].max().item() > 0
    other = DataLoader(Sentences(lambda: 3 + rank()), 4, collate_fn=padded_with_names)
    with pytest.raises(LayoutError, match=r"rank 0: \[part, 3\](.|\n)*rank 1: \[part, 4\](.|\n)*lengths are random"):
        list(oc.shard_dataloader(other, MESH, "x"))
    for batch in oc.shard_dataloader(other, MESH):  # as it says
        oc.reshard(batch["x"], MESH, [oc.Shard(0)])
