"""Seed 003, section 2.2.4.2.3: semi-automatic pipeline parallel on two ranks, with shard_op on sub-meshes.

onecard run --nproc_per_node 2 examples/seeds/semi_auto_pipeline_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import single_card_003
from onecard import ProcessMesh, shard_op
from single_card_003 import TrainArgs, class_dim, input_size, train


class SimpleNet(single_card_003.SimpleNet):
    """The one-card net in two stages: linear1 and linear2 run on rank 0, linear3 and the ReLU on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        x = shard_op(self.linear1, world_process_mesh[0])(x)
        x = self.linear2(x)  # where its input is
        x = shard_op(self.linear3, world_process_mesh[1])(x)
        x = self.relu(x)
        return x


world_process_mesh = ProcessMesh([0, 1], dim_names=["pp"])


def train_model(args: TrainArgs) -> list[float]:
    """Train on the two ranks; returns the losses."""
    torch.manual_seed(0)
    return train(SimpleNet(input_size, args.inner_size, class_dim), args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
