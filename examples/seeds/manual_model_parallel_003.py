"""Seed 003, section 2.2.4.1.3: model parallel by hand, with the layers of fleet. Its twin is `single_card_003.py`.

onecard run --nproc_per_node 2 examples/seeds/manual_model_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import Tensor, nn

from onecard import fleet
from single_card_003 import TrainArgs, accuracy, class_dim, input_size, make_train_loader, optimizer_setting


class SimpleNet(nn.Module):
    """The seed's net: linear1 by columns, linear2 by rows."""

    def __init__(self, input_size: int, inner_size: int, output_size: int) -> None:
        super().__init__()
        self.linear1 = fleet.meta_parallel.ColumnParallelLinear(
            input_size, inner_size, gather_output=False, has_bias=True
        )
        self.linear2 = fleet.meta_parallel.RowParallelLinear(
            inner_size, input_size, input_is_parallel=True, has_bias=True
        )
        self.linear3 = nn.Linear(input_size, output_size)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        x = self.relu(x)
        return x


dist_strategy = fleet.DistributedStrategy()
dist_strategy.hybrid_configs = {
    "dp_degree": 1,
    "mp_degree": 2,
    "pp_degree": 1,
}


def train_model(args: TrainArgs) -> list[float]:
    """Train on two ranks; returns the losses."""
    fleet.init(is_collective=True, strategy=dist_strategy)

    torch.manual_seed(0)  # every rank alike: the layers have the first values of one card's
    model = SimpleNet(input_size, args.inner_size, class_dim)
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)

    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)

    # The seed's DistributedBatchSampler gives each rank other batches; ranks that share a model must see the same.
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

            losses.append(avg_loss.item())
            if batch_id % 5 == 0:
                print(
                    f"[Epoch {eop}, batch {batch_id}] loss: {avg_loss:.5f}, acc1: {acc_top1:.5f}, acc5: {acc_top5:.5f}"
                )
    return losses


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
