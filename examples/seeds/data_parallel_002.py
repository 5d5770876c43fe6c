"""Seed 002, section 4.1: data parallel on four ranks. Only the input is marked: a batch (4, 128, 1024) cut to (1, 128, 1024).

onecard run --nproc_per_node 4 examples/seeds/data_parallel_002.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import onecard as oc
import single_card_002
from single_card_002 import HIDDEN, INNER, NUM_SAMPLES, SEQ_LEN, make_dataloader, train

mesh = oc.ProcessMesh([0, 1, 2, 3], dim_names=["x"])


class MlpModel(single_card_002.MlpModel):
    """The one-card model; its parameters stay plain tensors, which count as replicated."""

    def forward(self, x: Tensor) -> Tensor:
        # In the seed the call stands alone and marks x itself; here the marked tensor is what it returns.
        x = oc.shard_tensor(x, mesh, [oc.Shard(0)])
        return super().forward(x)


def train_model(
    seq_len: int = SEQ_LEN,
    hidden: int = HIDDEN,
    inner: int = INNER,
    num_samples: int = NUM_SAMPLES,
    shard_reading: bool = False,
) -> list[float]:
    """Train on the mesh; returns the losses.

    Args:
        shard_reading: read through ``shard_dataloader`` (section 2.1): each rank reads only its samples. Without it, as
            in the seed, each rank reads whole batches and keeps its part.
    """
    torch.manual_seed(0)
    dataloader = make_dataloader(seq_len, hidden, num_samples)
    if shard_reading:
        dataloader = oc.shard_dataloader(dataloader, mesh, shard_dims="x")
    return train(MlpModel(hidden, inner), dataloader)


if __name__ == "__main__":
    tyro.cli(train_model)
