"""Paddle's one-line calls for a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecard import fleet
from onecard.auto.apply import parallelize
from onecard.comm.world import world
from onecard.errors import PlanError
from onecard.fleet.front.wrapped import DistributedModel
from onecard.fleet.grid import topology


def DataParallel(
    layers: nn.Module,
    strategy: Any = None,
    comm_buffer_size: int = 25,
    last_comm_buffer_size: int = 1,
    find_unused_parameters: bool = False,
    group: Any = None,
) -> DistributedModel:
    """A model of which each rank trains a copy with its own part of the batch: ``fleet.distributed_model`` of ranks along dp.

    Gradients are averaged over the ranks when an optimizer, or clipping, reads them.

    Args:
        layers: plain, of any values: each rank takes those of the first.
        strategy, comm_buffer_size, last_comm_buffer_size, find_unused_parameters: not needed: buckets are as large as what is
            sent, and a parameter that took no part is known by itself.
        group: None: along which ranks is what ``fleet.init`` says; without it all.

    Raises:
        FleetError: a group of its own; a model that holds distributed tensors.

    Source: ``paddle.DataParallel``.
    """
    if group is not None:
        raise fleet.FleetError(
            'DataParallel(group=): which ranks average is what fleet.init says: hybrid_configs = {"dp_degree": n}'
        )
    if not topology.begun():
        fleet.init(is_collective=True)
    return fleet.distributed_model(layers)


def shard_scaler(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """The scaler as it is: all ranks skip a step together. Source: ``paddle.distributed.shard_scaler``."""
    return scaler


def to_distributed(
    model: nn.Module,
    optimizer: Optimizer,
    dataloader: Any,
    device_num: int | None = None,
    node_num: int = 1,
    config: Any = None,
) -> tuple[Any, Any, Any]:
    """Lay a plain model, its optimizer and its batches out by the plan that is found for them: ``oc.parallelize(plan="auto")``.

    Args:
        model, optimizer, dataloader: plain; the loader gives whole batches on every rank.
        device_num, node_num: how many devices each of how many hosts has; the launcher's environment says it, too.
        config: None; what Paddle's says is found.

    Returns:
        (model, optimizer, dataloader), the same objects.

    Raises:
        PlanError: another number of ranks than there are.

    Source: ``paddle.distributed.to_distributed``.
    """
    if config is not None:
        raise PlanError(
            "to_distributed(config=): the plan is found; one of your own: oc.parallelize(..., plan=oc.Plan(...))"
        )
    ranks = world.get_world_size()
    if device_num is not None and device_num * node_num != ranks:
        raise PlanError(f"to_distributed: device_num={device_num}, node_num={node_num}, and there are {ranks} ranks")
    return parallelize(model, optimizer, dataloader)
