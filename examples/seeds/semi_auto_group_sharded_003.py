"""Seed 003, section 2.2.4.2.4, which it leaves empty: group sharded by marks, at each of its three stages.

onecard run --nproc_per_node 2 examples/seeds/semi_auto_group_sharded_003.py --stage 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch import nn

import onecard as oc
import single_card_003
from single_card_003 import SimpleNet, accuracy, class_dim, input_size, make_train_loader, optimizer_setting

stages = {1: oc.ShardingStage1, 2: oc.ShardingStage2, 3: oc.ShardingStage3}


@dataclass(frozen=True)
class TrainArgs(single_card_003.TrainArgs):
    """What the programs of seed 003 take, and the stage."""

    stage: Literal[1, 2, 3] = 1


def train_model(args: TrainArgs) -> list[float]:
    """Train on all ranks; returns the losses. Against one card: four marks."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    torch.manual_seed(0)
    model = oc.shard_layer(SimpleNet(input_size, args.inner_size, class_dim), mesh)
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)
    optimizer = oc.shard_optimizer(optimizer, stages[args.stage]("dp", mesh))
    train_loader = oc.shard_dataloader(make_train_loader(args.batch_num), mesh, shard_dims="dp")

    loss_func = nn.CrossEntropyLoss()
    losses = []
    for eop in range(args.epoch):
        model.train()
        for batch_id, (img, label) in enumerate(train_loader):
            label = label.squeeze(1)
            out = model(img)
            avg_loss = loss_func(out, label)
            acc_top1 = accuracy(input=out, label=label, k=1)
            acc_top5 = accuracy(input=out, label=label, k=5)

            avg_loss.backward()
            optimizer.step()
            model.zero_grad()

            loss, acc1, acc5 = avg_loss.item(), acc_top1.item(), acc_top5.item()
            losses.append(loss)
            if batch_id % 5 == 0:
                print(f"[Epoch {eop}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}")
    return losses


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
