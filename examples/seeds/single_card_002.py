"""The one-card program that sections 4.1 to 4.4 of seed 002 distribute: two matrix products, AdamW, mean of the output.

python examples/seeds/single_card_002.py
"""

from __future__ import annotations

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import onecard as oc

# Sizes of the seed: a batch is (4, 128, 1024).
BATCH_SIZE = 4
SEQ_LEN = 128
HIDDEN = 1024
INNER = 4096
NUM_SAMPLES = 100


class RandomDataset(Dataset[np.ndarray]):
    """Random samples, each a function of its index: every rank and the one-card run see the same data."""

    def __init__(self, seq_len: int, hidden: int, num_samples: int = NUM_SAMPLES) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.hidden = hidden
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        rng = np.random.default_rng(index)
        return rng.uniform(size=[self.seq_len, self.hidden]).astype("float32")

    def __len__(self) -> int:
        return self.num_samples


class MlpModel(nn.Module):
    """z = x w0 w1."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.w0 = self.create_parameter(shape=[hidden, inner])
        self.w1 = self.create_parameter(shape=[inner, hidden])

    def create_parameter(self, shape: list[int]) -> nn.Parameter:
        """A parameter as Paddle initialises it by default."""
        return nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.w0)
        z = torch.matmul(y, self.w1)
        return z


def make_dataloader(seq_len: int = SEQ_LEN, hidden: int = HIDDEN, num_samples: int = NUM_SAMPLES) -> DataLoader:
    """Whole batches of ``BATCH_SIZE`` samples."""
    dataset = RandomDataset(seq_len, hidden, num_samples)
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=BATCH_SIZE, drop_last=False)
    return DataLoader(dataset, batch_sampler=sampler)


def train(model: nn.Module, dataloader: DataLoader | oc.ShardDataloader) -> list[float]:
    """One pass over the data; returns the losses. The loop is the same on one card and on a mesh."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.001)
    opt = oc.shard_optimizer(opt)
    losses = []
    for step, inputs in enumerate(dataloader):
        data = inputs
        logits = model(data)
        loss = torch.mean(logits)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(oc.unshard(loss.detach()).item())  # on every rank, wherever the loss lives
        print(step, losses[-1])
    return losses


def train_model(
    seq_len: int = SEQ_LEN, hidden: int = HIDDEN, inner: int = INNER, num_samples: int = NUM_SAMPLES
) -> list[float]:
    """Train on one card; returns the losses."""
    torch.manual_seed(0)
    return train(MlpModel(hidden, inner), make_dataloader(seq_len, hidden, num_samples))


if __name__ == "__main__":
    tyro.cli(train_model)
