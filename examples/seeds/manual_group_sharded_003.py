"""Seed 003, section 2.2.4.1.2: group sharded by hand, at each of its three levels. Its twin is `single_card_003.py`.

onecard run --nproc_per_node 2 examples/seeds/manual_group_sharded_003.py --level os_g
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import tyro

import onecard as oc
import single_card_003
from manual_data_parallel_003 import train
from onecard import fleet
from onecard.fleet import group_sharded_parallel
from single_card_003 import SimpleNet, class_dim, input_size, optimizer_setting


@dataclass(frozen=True)
class TrainArgs(single_card_003.TrainArgs):
    """What the programs of seed 003 take, and the level."""

    level: Literal["os", "os_g", "p_g_os"] = "p_g_os"


def train_model(args: TrainArgs) -> list[float]:
    """Train on all ranks; returns the losses."""
    fleet.init(is_collective=True)
    group = oc.new_group(list(range(oc.get_world_size())))

    torch.manual_seed(0)
    model = SimpleNet(input_size, args.inner_size, class_dim)
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)

    # wrap GroupSharded model, optimizer and scaler. level1='os', level2='os_g', level3='p_g_os'
    model, optimizer, _scaler = group_sharded_parallel(model, optimizer, level=args.level, group=group)
    return train(model, optimizer, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
