"""Seed 000: vocabulary-parallel embedding, column- and row-parallel linear layers on two ranks, beside the same net on one card.

    onecard run --nproc_per_node 2 examples/seeds/model_parallel_000.py --program static
    onecard run --nproc_per_node 2 examples/seeds/model_parallel_000.py --program dynamic

Both programs of the seed train the same net; they differ in their data, in linear3's first weight and in the learning
rate. They print the seed's losses: 11.943981, -2.2283082, ... (static) and 0.0, -0.14513375, ... (dynamic).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import onecard as oc

vocab_size = 20
hidden_size = 10
inner_size = 8
output_size = 10
seq_length = 2
batch_size = 4

mesh = oc.ProcessMesh([0, 1], dim_names=["mp"])


class SimpleNet(nn.Module):
    """Embedding and three linear layers.

    Args:
        np_fc1, np_fc2: the first weights of linear1 and linear2, (in, out) as in Paddle.
        fc3: every element of the first weight of linear3.
    """

    def __init__(self, np_fc1: np.ndarray, np_fc2: np.ndarray, fc3: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.linear1 = nn.Linear(hidden_size, inner_size)
        self.linear2 = nn.Linear(inner_size, hidden_size)
        self.linear3 = nn.Linear(hidden_size, output_size)
        with torch.no_grad():
            self.embedding.weight.fill_(0.5)
            # The weight of nn.Linear is (out, in).
            self.linear1.weight.copy_(torch.from_numpy(np_fc1.T))
            self.linear2.weight.copy_(torch.from_numpy(np_fc2.T))
            self.linear3.weight.fill_(fc3)
            for linear in (self.linear1, self.linear2, self.linear3):
                linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        return x


class SimpleMPNet(SimpleNet):
    """The same net on the mesh; what `PLACEMENTS` does not name is replicated."""

    # (out, in) again: the seed's axis=1 of linear1 (columns) is Shard(0) here, and its axis=0 of linear2 (rows) Shard(1).
    PLACEMENTS = {  # noqa: RUF012
        "embedding.weight": oc.Shard(0),  # by vocabulary
        "linear1.weight": oc.Shard(0),
        "linear1.bias": oc.Shard(0),
        "linear2.weight": oc.Shard(1),
    }

    def __init__(self, np_fc1: np.ndarray, np_fc2: np.ndarray, fc3: float) -> None:
        super().__init__(np_fc1, np_fc2, fc3)
        oc.shard_layer(self, mesh, self.shard_parameters)

    def shard_parameters(self, name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        """The ``shard_fn`` of ``shard_layer``."""
        for key, parameter in list(layer.named_parameters(recurse=False)):
            placement = self.PLACEMENTS.get(f"{name}.{key}", oc.Replicate())
            setattr(layer, key, oc.shard_tensor(parameter, mesh, [placement]))


def train_batch(batch: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; the same on one card and on a mesh."""
    output = model(batch)
    loss = output.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def first_weights(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """np_fc1 and np_fc2."""
    return rng.random_sample((hidden_size, inner_size)), rng.random_sample((inner_size, hidden_size))


def static_data() -> Iterator[np.ndarray]:
    """Batches of the static program: a generator of its own draws one row at a time, batch_size rows make a batch."""
    rng = np.random.RandomState(2021)
    while True:
        yield np.stack([rng.randint(0, vocab_size, [seq_length]) for _ in range(batch_size)])


def dynamic_data(rng: np.random.RandomState) -> Iterator[np.ndarray]:
    """Batches of the dynamic program: drawn whole, by the generator that drew the weights."""
    while True:
        yield rng.randint(0, vocab_size, (batch_size, seq_length))


def train_model(program: Literal["static", "dynamic"] = "static", steps: int = 5) -> tuple[list[float], list[float]]:
    """Train on the mesh and on one card; returns the losses of both."""
    rng = np.random.RandomState(1024)
    np_fc1, np_fc2 = first_weights(rng)
    if program == "static":
        data, fc3, learning_rate = static_data(), 0.1, 0.1
    else:
        data, fc3, learning_rate = dynamic_data(rng), 0.0, 0.001

    model_a = SimpleMPNet(np_fc1, np_fc2, fc3)
    optimizer_a = oc.shard_optimizer(torch.optim.SGD(model_a.parameters(), lr=learning_rate))
    model_b = SimpleNet(np_fc1, np_fc2, fc3)
    optimizer_b = torch.optim.SGD(model_b.parameters(), lr=learning_rate)

    losses_a, losses_b = [], []
    for _, np_data in zip(range(steps), data, strict=False):
        batch = torch.from_numpy(np_data)
        losses_a.append(train_batch(batch, model_a, optimizer_a).item())
        losses_b.append(train_batch(batch, model_b, optimizer_b).item())
        print("mp_loss: ", np.float32(losses_a[-1]), " single_loss: ", np.float32(losses_b[-1]))
    return losses_a, losses_b


if __name__ == "__main__":
    tyro.cli(train_model)
