"""Seed 002, section 4.2: tensor parallel on four ranks. The first weight is cut by columns, the second by rows.

onecard run --nproc_per_node 4 examples/seeds/tensor_parallel_002.py
"""

from __future__ import annotations

import torch
import tyro

import onecard as oc
import single_card_002
from single_card_002 import HIDDEN, INNER, NUM_SAMPLES, SEQ_LEN, make_dataloader, train

mesh = oc.ProcessMesh([0, 1, 2, 3], dim_names=["x"])


class MlpModel(single_card_002.MlpModel):
    """The one-card model with its parameters cut; every rank has the whole batch, and the output is Partial."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__(hidden, inner)
        # These are plain (in, out) matrices, so the dims are those of the seed. The weight of nn.Linear is (out, in):
        # there the first would be Shard(0) and the second Shard(1).
        self.w0 = oc.shard_tensor(self.w0, mesh, [oc.Shard(1)])
        self.w1 = oc.shard_tensor(self.w1, mesh, [oc.Shard(0)])


def train_model(
    seq_len: int = SEQ_LEN, hidden: int = HIDDEN, inner: int = INNER, num_samples: int = NUM_SAMPLES
) -> list[float]:
    """Train on the mesh; returns the losses."""
    torch.manual_seed(0)
    return train(MlpModel(hidden, inner), make_dataloader(seq_len, hidden, num_samples))


if __name__ == "__main__":
    tyro.cli(train_model)
