"""Seed 003, section 2.2.4.3.4: static pipeline parallel on two ranks, with an Engine. The network is that of one card.

onecard run --nproc_per_node 2 examples/seeds/static_pipeline_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro

from onecard import Strategy
from single_card_003 import SimpleNet, TrainArgs, batch_size, class_dim, input_size
from static_data_parallel_003 import train_engine

micro_batch_size = 16
auto_strategy = Strategy()
auto_strategy.pipeline.enable = True
auto_strategy.pipeline.micro_batch_size = micro_batch_size
auto_strategy.pipeline.accumulate_steps = batch_size // micro_batch_size
auto_strategy.pipeline.at = ["linear3"]  # with which the second stage begins; the seed marks it in forward


def train_model(args: TrainArgs) -> list[float]:
    """Train on two ranks; returns the losses: of the whole batch, on both, so that no rank needs a case of its own."""
    torch.manual_seed(0)
    return train_engine(SimpleNet(input_size, args.inner_size, class_dim), auto_strategy, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
