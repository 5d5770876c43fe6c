"""Seed 000 as it is written: by hand, with `split` (static program) and with the layers of fleet (dynamic program).

    onecard run --nproc_per_node 2 examples/seeds/manual_model_parallel_000.py --program static
    python -m onecard.launch --nproc_per_node 2 examples/seeds/manual_model_parallel_000.py --program dynamic

Prints the seed's tables: 11.943981, -2.2283082, ... (static) and 0.0, -0.14513375, ... (dynamic). The same net by
placements is `model_parallel_000.py`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

import onecard as oc
from model_parallel_000 import (
    SimpleNet,
    batch_size,
    dynamic_data,
    first_weights,
    hidden_size,
    inner_size,
    output_size,
    static_data,
    train_batch,
    vocab_size,
)
from onecard import fleet
from onecard.fleet import Assign, Constant, ParamAttr


class SplitNet(nn.Module):
    """The static program's net: every divided layer is a call of `split`."""

    def __init__(self, np_fc1: np.ndarray, np_fc2: np.ndarray, mp_id: int) -> None:
        super().__init__()
        if mp_id == 0:
            init_fc1_data = np_fc1[:, : (inner_size // 2)]
            init_fc2_data = np_fc2[: (inner_size // 2), :]
        else:
            init_fc1_data = np_fc1[:, (inner_size // 2) :]
            init_fc2_data = np_fc2[(inner_size // 2) :, :]
        # The seed leaves bias_attr out, which in Paddle is zeros; a weight is (out, in) in torch.
        self.weight_attr1 = ParamAttr(initializer=Assign(init_fc1_data.T))
        self.weight_attr2 = ParamAttr(initializer=Assign(init_fc2_data.T))
        self.zeros = Constant(0.0)
        self.linear3 = nn.Linear(hidden_size, output_size)
        nn.init.constant_(self.linear3.weight, 0.1)
        nn.init.zeros_(self.linear3.bias)
        self.embedding_weight = Constant(value=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = oc.split(
            x, size=(vocab_size, hidden_size), operation="embedding", axis=0, num_partitions=2,
            gather_out=True, weight_attr=self.embedding_weight,
        )  # fmt: skip
        x = oc.split(
            x, size=(hidden_size, inner_size), operation="linear", axis=1, num_partitions=2,
            gather_out=False, weight_attr=self.weight_attr1, bias_attr=self.zeros,
        )  # fmt: skip
        x = oc.split(
            x, size=(inner_size, hidden_size), operation="linear", axis=0, num_partitions=2,
            gather_out=True, weight_attr=self.weight_attr2, bias_attr=self.zeros,
        )  # fmt: skip
        x = self.linear3(x)
        return x


class SimpleMPNet(nn.Module):
    """The dynamic program's net."""

    def __init__(self, np_fc1: np.ndarray, np_fc2: np.ndarray, mp_id: int) -> None:
        super().__init__()
        if mp_id == 0:
            init_fc1_data = np_fc1[:, : (inner_size // 2)]
            init_fc2_data = np_fc2[: (inner_size // 2), :]
        else:
            init_fc1_data = np_fc1[:, (inner_size // 2) :]
            init_fc2_data = np_fc2[(inner_size // 2) :, :]

        self.linear1 = fleet.meta_parallel.ColumnParallelLinear(
            hidden_size,
            inner_size,
            weight_attr=ParamAttr(initializer=Assign(init_fc1_data.T)),
            gather_output=False,
            has_bias=True,
            bias_attr=Constant(0.0),
        )
        self.linear2 = fleet.meta_parallel.RowParallelLinear(
            inner_size,
            hidden_size,
            weight_attr=ParamAttr(initializer=Assign(init_fc2_data.T)),
            input_is_parallel=True,
            has_bias=True,
            bias_attr=Constant(0.0),
        )
        self.linear3 = nn.Linear(hidden_size, output_size)
        nn.init.zeros_(self.linear3.weight)
        nn.init.zeros_(self.linear3.bias)
        self.embedding = fleet.meta_parallel.VocabParallelEmbedding(
            vocab_size, hidden_size, weight_attr=Constant(value=0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.linear1(x)
        x = self.linear2(x)
        x = self.linear3(x)
        return x


def begin(program: str) -> None:
    """What the two programs say to fleet."""
    strategy = fleet.DistributedStrategy()
    if program == "static":
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
    else:
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)


def train_model(program: Literal["static", "dynamic"] = "static", steps: int = 5) -> tuple[list[float], list[float]]:
    """Train on two ranks and on one card; returns the losses of both."""
    begin(program)
    hcg = fleet.get_hybrid_communicate_group()
    mp_id = hcg.get_model_parallel_rank()
    rng = np.random.RandomState(1024)  # the seed adds the rank to paddle.seed only, not to numpy's
    np_fc1, np_fc2 = first_weights(rng)
    if program == "static":
        data, fc3, learning_rate, make = static_data(), 0.1, 0.1, SplitNet
    else:
        data, fc3, learning_rate, make = dynamic_data(rng), 0.0, 0.001, SimpleMPNet

    model_b = SimpleNet(np_fc1, np_fc2, fc3)
    optimizer_b = torch.optim.SGD(model_b.parameters(), lr=learning_rate)

    net: nn.Module = make(np_fc1, np_fc2, mp_id)
    with torch.no_grad():
        net(
            torch.zeros(batch_size, 2, dtype=torch.int64)
        )  # the layers of split are made; a static program is built here
    optimizer_a = torch.optim.SGD(net.parameters(), lr=learning_rate)
    model_a = fleet.distributed_model(net)
    optimizer_a = fleet.distributed_optimizer(optimizer_a)

    losses_a, losses_b = [], []
    for _, np_data in zip(range(steps), data, strict=False):
        batch = torch.from_numpy(np_data)
        losses_a.append(train_batch(batch, model_a, optimizer_a).item())
        losses_b.append(train_batch(batch, model_b, optimizer_b).item())
        print("mp_loss: ", np.float32(losses_a[-1]), " single_loss: ", np.float32(losses_b[-1]))
    return losses_a, losses_b


if __name__ == "__main__":
    tyro.cli(train_model)
