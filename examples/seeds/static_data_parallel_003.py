"""Seed 003, section 2.2.4.3.1: static data parallel on all ranks, with an Engine. The network is that of one card.

onecard run --nproc_per_node 2 examples/seeds/static_data_parallel_003.py
"""

from __future__ import annotations

import torch
import tyro
from torch import nn

from onecard import Accuracy, Engine, InputSpec, Strategy
from single_card_003 import (
    RandomDataset,
    SimpleNet,
    TrainArgs,
    batch_size,
    class_dim,
    input_size,
    optimizer_setting,
)

auto_strategy = Strategy()  # data parallel, if nothing else is said


def train_engine(model: nn.Module, strategy: Strategy, args: TrainArgs) -> list[float]:
    """Train a model under a strategy; returns the losses. Of the whole batch, on every rank, as the accuracies are."""
    loss_func = nn.CrossEntropyLoss()
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)
    metrics = Accuracy(topk=(1, 5))

    engine = Engine(model, loss_func, optimizer, metrics, strategy=strategy)
    engine.prepare(
        inputs_spec=InputSpec(shape=[None, input_size], dtype="float32", name="img"),
        labels_spec=InputSpec(shape=[None], dtype="int64", name="label"),
        mode="train",
    )
    dataset = RandomDataset(args.batch_num * batch_size)
    train_loader = engine.dataloader(dataset=dataset, batch_size=batch_size, epochs=args.epoch, mode="train")

    losses = []
    for eop in range(args.epoch):
        model.train()
        for batch_id, data in enumerate(train_loader()):
            outs = engine.run(data, mode="train")
            losses.append(float(outs["loss"]))
            if batch_id % 5 == 0:
                loss, acc1, acc5 = outs["loss"], outs["acc_top1"], outs["acc_top5"]
                print(f"[Epoch {eop}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}")
    return losses


def train_model(args: TrainArgs) -> list[float]:
    """Train on all ranks; returns the losses."""
    torch.manual_seed(0)
    return train_engine(SimpleNet(input_size, args.inner_size, class_dim), auto_strategy, args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
