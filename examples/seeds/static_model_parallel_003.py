"""Seed 003, section 2.2.4.3.3: static model parallel on two ranks, an Engine. Marks of parameters; `forward` is one card's.

onecard run --nproc_per_node 2 examples/seeds/static_model_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro

import single_card_003
from onecard import ProcessMesh, Shard, Strategy, shard_tensor
from single_card_003 import TrainArgs, class_dim, input_size
from static_data_parallel_003 import train_engine


class SimpleNet(single_card_003.SimpleNet):
    """The one-card net with linear1 cut by outputs (columns) and linear2 by inputs (rows)."""

    def __init__(self, input_size: int, inner_size: int, output_size: int) -> None:
        super().__init__(input_size, inner_size, output_size)
        self.linear1.weight = shard_tensor(self.linear1.weight, world_process_mesh, [Shard(0)])
        self.linear1.bias = shard_tensor(self.linear1.bias, world_process_mesh, [Shard(0)])
        self.linear2.weight = shard_tensor(self.linear2.weight, world_process_mesh, [Shard(1)])


world_process_mesh = ProcessMesh([0, 1], dim_names=["mp"])
auto_strategy = Strategy()


def train_model(args: TrainArgs) -> list[float]:
    """Train on the mesh; returns the losses. The marks say which ranks divide what: the batch is whole on both."""
    torch.manual_seed(0)
    return train_engine(SimpleNet(input_size, args.inner_size, class_dim), auto_strategy, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
