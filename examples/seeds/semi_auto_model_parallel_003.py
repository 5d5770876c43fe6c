"""Seed 003, section 2.2.4.2.2: semi-automatic model parallel on two ranks, with shard_tensor and shard_op.

onecard run --nproc_per_node 2 examples/seeds/semi_auto_model_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor

import single_card_003
from onecard import ProcessMesh, Shard, shard_op, shard_tensor
from single_card_003 import TrainArgs, class_dim, input_size, train


class SimpleNet(single_card_003.SimpleNet):
    """The one-card net with linear1 cut by outputs (columns) and linear2 by inputs (rows)."""

    def __init__(self, input_size: int, inner_size: int, output_size: int) -> None:
        super().__init__(input_size, inner_size, output_size)
        # The seed marks the parameters at each forward and drops what the calls return. Here the marked parameters take
        # the place of the plain ones, before the optimizer sees them. Paddle's weight is (in, out), PyTorch's (out, in):
        # the seed's Shard(1) of linear1 is Shard(0) here, and its Shard(0) of linear2 is Shard(1).
        self.linear1.weight = shard_tensor(self.linear1.weight, world_process_mesh, [Shard(0)])
        self.linear1.bias = shard_tensor(self.linear1.bias, world_process_mesh, [Shard(0)])
        self.linear2.weight = shard_tensor(self.linear2.weight, world_process_mesh, [Shard(1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        x = self.linear2(x)
        # A dims mapping names, for each dim, the mesh axis that cuts it: here none, so x is made whole.
        x_dims_mapping = [None, None]
        w_dims_mapping = [None, None]
        matmul = shard_op(torch.matmul, world_process_mesh, [x_dims_mapping, w_dims_mapping])
        x = matmul(x, self.linear3.weight.t()) + self.linear3.bias
        x = self.relu(x)
        return x


world_process_mesh = ProcessMesh([0, 1], dim_names=["mp"])


def train_model(args: TrainArgs) -> list[float]:
    """Train on the mesh; returns the losses."""
    torch.manual_seed(0)
    return train(SimpleNet(input_size, args.inner_size, class_dim), args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
