"""Measure what Python does for a parameter whose states are divided: in clipping and in the optimizer of a plain loop."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from onecard.comm.world.pretend import pretend
from onecard.place.mesh import ProcessMesh
from onecard.tensor import shard_tensor
from onecard.train.zero.optimizer import shard_optimizer
from onecard.train.zero.zero import ShardingStage1

COUNT, ROUNDS = 16, 8
"""Parameters, and steps of which the fastest counts."""
_SIDE = 16


def divided_parameter() -> float:
    """Seconds of the processor that a parameter divided by ZeRO-1 takes in a step more than a whole one.

    As one of two ranks that are not there: nothing is sent, so that what Python does is left.
    """
    with pretend(2, 0), torch.enable_grad():
        whole, divided = _seconds(False), _seconds(True)
    return max(1e-9, divided - whole) / COUNT


def _seconds(divides: bool) -> float:
    mesh = ProcessMesh([0, 1], ["dp"])
    everywhere, rows = [Replicate()], [Shard(0)]
    parameters = [nn.Parameter(shard_tensor(torch.eye(_SIDE, device="cpu"), mesh, everywhere)) for _ in range(COUNT)]
    optimizer = shard_optimizer(torch.optim.AdamW(parameters), ShardingStage1("dp", mesh) if divides else None)
    x = shard_tensor(torch.ones(2, _SIDE, device="cpu"), mesh, rows)
    found = []
    for _ in range(ROUNDS):
        made: torch.Tensor = x
        for parameter in parameters:
            made = made @ parameter
        made.mean().backward()
        before = time.process_time()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(time.process_time() - before)
        optimizer.zero_grad()
    return min(found)
