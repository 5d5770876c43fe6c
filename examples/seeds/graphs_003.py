"""Seed 003, sections 2.1.2, 2.2.3 and 2.2.4.3: graphs of a training step, drawn from its recordings.

On one card, data parallel, model parallel, with the optimizer sharded, with recomputation and with mixed precision; and the
programs of the static level: serial, and by strategy. No devices: each is rank 0 of a pretended world.

python examples/seeds/graphs_003.py                        # writes docs/figures/graph_003_*.svg
python examples/seeds/graphs_003.py --folder . --inner-size 64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
import semi_auto_data_parallel_003 as data_parallel
import semi_auto_model_parallel_003 as model_parallel
import single_card_003 as single
import static_group_sharded_003 as group_sharded
import static_model_parallel_003 as static_model_parallel
import static_pipeline_parallel_003 as pipeline
from single_card_003 import batch_size, class_dim, inner_size, input_size, optimizer_setting


@dataclass(frozen=True)
class Args:
    """What the program takes on the command line."""

    folder: Path = Path(__file__).parents[2] / "docs" / "figures"
    inner_size: int = inner_size


class Recomputing(single.SimpleNet):
    """Its first two layers are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.linear2(self.linear1(x)), x, use_reentrant=False)
        return self.relu(self.linear3(x))


class MixedPrecision(single.SimpleNet):
    """Its products are made in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def sharded(model: nn.Module) -> torch.optim.Optimizer:
    """Data parallel, each rank with half of the optimizer's states."""
    oc.shard_layer(model, data_parallel.world_process_mesh)
    stage = oc.ShardingStage1("dp", data_parallel.world_process_mesh)
    return oc.shard_optimizer(plain(model), stage)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """The seed's."""
    return optimizer_setting(list(model.parameters()))


# name, ranks, the network, its optimizer
GRAPHS: dict[str, tuple[int, type[nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "single_card": (1, single.SimpleNet, plain),
    "data_parallel": (2, data_parallel.SimpleNet, plain),
    "model_parallel": (2, model_parallel.SimpleNet, plain),
    "sharding": (2, data_parallel.SimpleNet, sharded),
    "recompute": (1, Recomputing, plain),
    "amp": (1, MixedPrecision, plain),
}


def recorded(name: str, inner_size: int) -> oc.Recording:
    """The second step: the optimizer has its states."""
    ranks, net, optimizer_of = GRAPHS[name]
    with oc.pretend(world_size=ranks, rank=0, fake=True):
        model = net(input_size, inner_size, class_dim)
        optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
        image, label = torch.rand(batch_size, input_size), torch.zeros(batch_size, dtype=torch.long)

        def step(image: Tensor, label: Tensor) -> Tensor:
            loss = loss_of(model(image), label)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss.detach()

        step(image, label)
        step.__name__ = name.replace("_", " ")
        return oc.record(step)(image, label)


# name, the network, its strategy
STATIC: dict[str, tuple[type[nn.Module], oc.Strategy]] = {
    "data_parallel": (single.SimpleNet, oc.Strategy()),
    "group_sharded": (single.SimpleNet, group_sharded.strategy_of(group_sharded.TrainArgs(stage=2))),
    "model_parallel": (static_model_parallel.SimpleNet, static_model_parallel.auto_strategy),
    "pipeline_parallel": (single.SimpleNet, pipeline.auto_strategy),
}


def programs(name: str, inner_size: int, rank: int = 0) -> dict[str, oc.Recording]:
    """What an engine would run, before it runs: of data parallel the serial program, too, which is that of all."""
    net, strategy = STATIC[name]
    with oc.pretend(world_size=2, rank=rank, fake=True):
        model = net(input_size, inner_size, class_dim)
        engine = oc.Engine(model, nn.CrossEntropyLoss(), plain(model), oc.Accuracy(topk=(1, 5)), strategy)
        img = oc.InputSpec(shape=[batch_size, input_size], dtype="float32", name="img")
        engine.prepare(img, oc.InputSpec(shape=[batch_size], dtype="int64", name="label"), mode="train")
        serial = {"static_serial": engine.serial_main_program} if name == "data_parallel" else {}
        return serial | {f"static_{name}{'_second' * rank}": engine.main_program}


def main(args: Args) -> None:
    """Draw all of them."""
    drawn = {name: recorded(name, args.inner_size) for name in GRAPHS}
    for name in STATIC:
        drawn |= programs(name, args.inner_size)
    drawn |= programs("pipeline_parallel", args.inner_size, rank=1)  # the other stage
    for name, recording in drawn.items():
        path = args.folder / f"graph_003_{name}.svg"
        recording.draw(path)
        print(path.name)


if __name__ == "__main__":
    main(tyro.cli(Args))
