"""Seed 003, section 2.2.4.2.1: semi-automatic data parallel on two ranks. One line in forward marks the input.

onecard run --nproc_per_node 2 examples/seeds/semi_auto_data_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import single_card_003
from onecard import ProcessMesh, Shard, shard_tensor
from single_card_003 import TrainArgs, class_dim, input_size, train


class SimpleNet(single_card_003.SimpleNet):
    """The one-card net on a batch cut along dim 0; its plain parameters count as replicated."""

    def forward(self, x: Tensor) -> Tensor:
        x = shard_tensor(x, world_process_mesh, [Shard(0)])
        return super().forward(x)


world_process_mesh = ProcessMesh([0, 1], dim_names=["dp"])


def train_model(args: TrainArgs) -> list[float]:
    """Train on the mesh; returns the losses. The seed leaves the accuracies out; here they need no change."""
    torch.manual_seed(0)
    return train(SimpleNet(input_size, args.inner_size, class_dim), args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
