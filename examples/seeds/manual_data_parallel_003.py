"""Seed 003, section 2.2.4.1.1: data parallel by hand. Its twin is `single_card_003.py`.

onecard run --nproc_per_node 2 examples/seeds/manual_data_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import nn
from torch.utils.data import DataLoader

import onecard as oc
from onecard import fleet, get_rank
from single_card_003 import (
    RandomDataset,
    SimpleNet,
    TrainArgs,
    accuracy,
    batch_size,
    class_dim,
    input_size,
    optimizer_setting,
)

dist_strategy = fleet.DistributedStrategy()
dist_strategy.hybrid_configs = {
    "dp_degree": 2,
    "mp_degree": 1,
    "pp_degree": 1,
}


def make_train_loader(batch_num: int) -> DataLoader:
    """This rank's part of the batches of one card. The seed gives each rank 32 samples, which are 64 a step."""
    dataset = RandomDataset(batch_num * batch_size)
    sampler = oc.DistributedBatchSampler(
        dataset, rank=get_rank(), batch_size=batch_size // oc.get_world_size(), shuffle=False, drop_last=True
    )
    return DataLoader(dataset, batch_sampler=sampler, num_workers=1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, args: TrainArgs) -> list[float]:
    """The seed's loop; returns the losses of the whole batches."""
    train_loader = make_train_loader(args.batch_num)
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
            model.clear_gradients()

            means = torch.stack(
                [avg_loss.detach(), acc_top1, acc_top5]
            )  # the seed prints those of each rank's own part
            oc.all_reduce(means, oc.ReduceOp.AVG)
            loss, acc1, acc5 = means.tolist()
            losses.append(loss)
            if batch_id % 5 == 0:
                print(f"[Epoch {eop}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}")
    return losses


def train_model(args: TrainArgs) -> list[float]:
    """Train on two ranks; returns the losses."""
    fleet.init(is_collective=True, strategy=dist_strategy)

    torch.manual_seed(0)
    model = SimpleNet(input_size, args.inner_size, class_dim)
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)

    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    return train(model, optimizer, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
