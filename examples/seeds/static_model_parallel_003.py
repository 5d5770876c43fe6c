"""Seed 003, section 2.2.4.3.3: static model parallel on two ranks, with an Engine. The marks are those of dynamic mode.

onecard run --nproc_per_node 2 examples/seeds/static_model_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro

from onecard import Strategy
from semi_auto_model_parallel_003 import SimpleNet
from single_card_003 import TrainArgs, class_dim, input_size
from static_data_parallel_003 import train_engine

auto_strategy = Strategy()


def train_model(args: TrainArgs) -> list[float]:
    """Train on the mesh; returns the losses. The marks say which ranks divide what: the batch is whole on both."""
    torch.manual_seed(0)
    return train_engine(SimpleNet(input_size, args.inner_size, class_dim), auto_strategy, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
