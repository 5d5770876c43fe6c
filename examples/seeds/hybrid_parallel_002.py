"""Seed 002, section 4.4: data, tensor and pipeline parallel at once on eight ranks. Two stages, each a mesh of 2 x 2.

onecard run --nproc_per_node 8 examples/seeds/hybrid_parallel_002.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import onecard as oc
import single_card_002
from single_card_002 import HIDDEN, INNER, NUM_SAMPLES, SEQ_LEN, make_dataloader, train

mesh0 = oc.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
mesh1 = oc.ProcessMesh([[4, 5], [6, 7]], dim_names=["x", "y"])


class MlpModel(single_card_002.MlpModel):
    """The one-card model: the batch is cut along x, the weights along y, and the stages are the two meshes."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__(hidden, inner)
        self.w0 = oc.shard_tensor(self.w0, mesh0, [oc.Replicate(), oc.Shard(1)])  # model parallel, by columns
        self.w1 = oc.shard_tensor(self.w1, mesh1, [oc.Replicate(), oc.Shard(0)])  # model parallel, by rows

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.w0)
        y = oc.reshard(y, mesh1, [oc.Shard(0), oc.Shard(2)])  # pipeline parallel
        z = torch.matmul(y, self.w1)
        return z


def train_model(
    seq_len: int = SEQ_LEN, hidden: int = HIDDEN, inner: int = INNER, num_samples: int = NUM_SAMPLES
) -> list[float]:
    """Train on the two meshes; returns the losses."""
    torch.manual_seed(0)
    dataloader = oc.shard_dataloader(
        make_dataloader(seq_len, hidden, num_samples), meshes=[mesh0, mesh1], shard_dims="x"
    )
    return train(MlpModel(hidden, inner), dataloader)


if __name__ == "__main__":
    tyro.cli(train_model)
