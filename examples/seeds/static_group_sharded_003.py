"""Seed 003, section 2.2.4.3.2: static group sharded, with an Engine: three lines of a Strategy more than data parallel.

onecard run --nproc_per_node 2 examples/seeds/static_group_sharded_003.py --stage 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import single_card_003
from onecard import Strategy
from single_card_003 import SimpleNet, class_dim, input_size
from static_data_parallel_003 import train_engine


@dataclass(frozen=True)
class TrainArgs(single_card_003.TrainArgs):
    """What the programs of seed 003 take, the stage, and over how many ranks it divides."""

    stage: Literal[1, 2, 3] = 1
    degree: int = 2


def strategy_of(args: TrainArgs) -> Strategy:
    """The seed's, with its stage."""
    auto_strategy = Strategy()
    auto_strategy.sharding.enable = True
    auto_strategy.sharding.stage = args.stage
    auto_strategy.sharding.degree = args.degree
    return auto_strategy


def train_model(args: TrainArgs) -> list[float]:
    """Train on all ranks; returns the losses."""
    torch.manual_seed(0)
    return train_engine(SimpleNet(input_size, args.inner_size, class_dim), strategy_of(args), args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
