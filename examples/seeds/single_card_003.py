"""Seed 003, section 2.1.1: the one-card program that its other sections distribute.

python examples/seeds/single_card_003.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import onecard as oc

base_lr = (
    0.001  # the seed has 0.1, with which a net of this width diverges: on one card the loss is 1e14 after 5 batches
)
momentum_rate = 0.9
l2_decay = 1e-4

epoch = 1  # 5 in the seed
batch_num = 20  # batches in an epoch; 100 in the seed
batch_size = 32
class_dim = 10
input_size = 256
inner_size = 102400


class RandomDataset(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Random images and labels, each a function of its index: every rank and the one-card run see the same data."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(idx)
        image = rng.random([input_size]).astype("float32")
        label = rng.integers(0, class_dim - 1, (1,)).astype("int64")
        return image, label

    def __len__(self) -> int:
        return self.num_samples


def optimizer_setting(parameter_list: list[nn.Parameter], base_lr: float = base_lr) -> torch.optim.Optimizer:
    """Momentum with L2 decay."""
    return torch.optim.SGD(parameter_list, lr=base_lr, momentum=momentum_rate, weight_decay=l2_decay)


class SimpleNet(nn.Module):
    """Three linear layers and a ReLU."""

    def __init__(self, input_size: int, inner_size: int, output_size: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(input_size, inner_size)
        self.linear2 = nn.Linear(inner_size, input_size)
        self.linear3 = nn.Linear(input_size, output_size)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        x = self.relu(x)
        return x


def accuracy(input: Tensor, label: Tensor, k: int) -> Tensor:
    """The share of samples whose label is among the k largest outputs."""
    return (input.topk(k).indices == label[:, None]).any(1).float().mean()


def make_train_loader(batch_num: int) -> DataLoader:
    """Whole batches, in order."""
    dataset = RandomDataset(batch_num * batch_size)
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=True)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=1)


@dataclass(frozen=True)
class TrainArgs:
    """What the programs of seed 003 take on the command line."""

    inner_size: int = inner_size
    epoch: int = epoch
    batch_num: int = batch_num
    base_lr: float = base_lr


def train(model: nn.Module, args: TrainArgs) -> list[float]:
    """Train a model, on one card or on a mesh; returns the losses."""
    loss_func = nn.CrossEntropyLoss()
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)
    train_loader = make_train_loader(args.batch_num)
    losses = []
    for eop in range(args.epoch):
        model.train()
        for batch_id, (img, label) in enumerate(train_loader):
            label = label.squeeze(1)  # torch takes class labels as [batch]
            out = model(img)
            avg_loss = loss_func(out, label)
            acc_top1 = accuracy(input=out, label=label, k=1)
            acc_top5 = accuracy(input=out, label=label, k=5)

            avg_loss.backward()
            optimizer.step()
            model.zero_grad()

            # On every rank, wherever the loss lives.
            loss, acc1, acc5 = (oc.unshard(value.detach()).item() for value in (avg_loss, acc_top1, acc_top5))
            losses.append(loss)
            if batch_id % 5 == 0:
                print(f"[Epoch {eop}, batch {batch_id}] loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}")
    return losses


def train_model(args: TrainArgs) -> list[float]:
    """Train on one card; returns the losses."""
    torch.manual_seed(0)
    return train(SimpleNet(input_size, args.inner_size, class_dim), args)


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
