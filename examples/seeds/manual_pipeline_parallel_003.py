"""Seed 003, section 2.2.4.1.4: pipeline parallel by hand, with fleet's PipelineLayer. Its twin is `single_card_003.py`.

onecard run --nproc_per_node 2 examples/seeds/manual_pipeline_parallel_003.py
"""

from __future__ import annotations

from typing import Any

import torch
import tyro
from torch import nn

from onecard import fleet
from onecard.fleet.meta_parallel import LayerDesc, PipelineLayer
from single_card_003 import TrainArgs, batch_size, class_dim, input_size, make_train_loader, optimizer_setting


class SimpleNet(PipelineLayer):
    """The seed's net as a list of layers: a rank makes those of its own stage."""

    def __init__(self, input_size: int, inner_size: int, output_size: int, **kwargs: Any) -> None:
        decs = [
            LayerDesc(nn.Linear, input_size, inner_size),
            LayerDesc(nn.Linear, inner_size, input_size),
            LayerDesc(nn.Linear, input_size, output_size),
            LayerDesc(nn.ReLU),
        ]
        super().__init__(layers=decs, loss_fn=nn.CrossEntropyLoss(), **kwargs)


dist_strategy = fleet.DistributedStrategy()
dist_strategy.hybrid_configs = {
    "dp_degree": 1,
    "mp_degree": 1,
    "pp_degree": 2,
}
micro_batch_size = 16
num_stages = batch_size // micro_batch_size
dist_strategy.pipeline_configs = {
    "accumulate_steps": num_stages,
    "micro_batch_size": micro_batch_size,
}


def train_model(args: TrainArgs) -> list[float]:
    """Train on two ranks; returns the losses."""
    fleet.init(is_collective=True, strategy=dist_strategy)

    torch.manual_seed(0)  # every rank alike: the layers have the first values of one card's
    model = SimpleNet(input_size=input_size, inner_size=args.inner_size, output_size=class_dim, num_stages=num_stages)
    optimizer = optimizer_setting(list(model.parameters()), args.base_lr)

    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)

    # The seed's DistributedBatchSampler gives each rank other batches; ranks that share a model must see the same.
    train_loader = make_train_loader(args.batch_num)
    losses = []
    for eop in range(args.epoch):
        model.train()
        for batch_id, (img, label) in enumerate(train_loader):
            label = label.squeeze(1)
            loss = model.train_batch([img, label], optimizer)
            avg_loss = torch.mean(loss)

            losses.append(avg_loss.item())
            if batch_id % 5 == 0:
                print(f"[Epoch {eop}, batch {batch_id}] loss: {avg_loss:.5f}")
    return losses


if __name__ == "__main__":
    train_model(tyro.cli(TrainArgs))
