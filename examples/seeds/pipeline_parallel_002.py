"""Seed 002, section 4.3: pipeline parallel on eight ranks, by marks alone. Four ranks hold the first weight, four the second.

onecard run --nproc_per_node 8 examples/seeds/pipeline_parallel_002.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import onecard as oc
import single_card_002
from single_card_002 import HIDDEN, INNER, NUM_SAMPLES, SEQ_LEN, make_dataloader, train

mesh0 = oc.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
mesh1 = oc.ProcessMesh([4, 5, 6, 7], dim_names=["x"])


class MlpModel(single_card_002.MlpModel):
    """The one-card model in two stages. Every rank runs all of it; outside a stage's mesh it computes shapes only."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__(hidden, inner)
        self.w0 = oc.shard_tensor(self.w0, mesh0, [oc.Replicate()])
        self.w1 = oc.shard_tensor(self.w1, mesh1, [oc.Replicate()])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.w0)
        # What stage 0 has computed goes to stage 1.
        y = oc.reshard(y, mesh1, [oc.Replicate()])
        z = torch.matmul(y, self.w1)
        return z


def train_model(
    seq_len: int = SEQ_LEN, hidden: int = HIDDEN, inner: int = INNER, num_samples: int = NUM_SAMPLES
) -> list[float]:
    """Train on the two meshes; returns the losses."""
    torch.manual_seed(0)
    return train(MlpModel(hidden, inner), make_dataloader(seq_len, hidden, num_samples))


if __name__ == "__main__":
    tyro.cli(train_model)
