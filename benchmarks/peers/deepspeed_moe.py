"""DeepSpeed's MOELayer, as its users make it: every token goes to its experts, nothing is dropped, no random second choice."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class Expert(nn.Module):
    """One expert, two products."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, hidden, bias=False), nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def begin() -> None:
    """DeepSpeed takes the processes' own group: whatever backend that has."""
    logging.disable(logging.WARNING)
    import deepspeed.comm as comm
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute, and for inference alone
    comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False, verbose=False)


def layer(gate: Tensor, up: Tensor, down: Tensor, k: int) -> Any:
    """The layer with given first values: gate (experts, d), up (experts, d, hidden), down (experts, hidden, d)."""
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    begin()
    (total, d_model, hidden), ranks = up.shape, dist.get_world_size()
    each = total // ranks
    first = each * dist.get_rank()
    router = TopKGate(d_model, total, k, drop_tokens=False, top2_2nd_expert_sampling=False)
    experts = Experts(Expert(d_model, hidden), each, "experts")
    router.wg.weight.data.copy_(gate)
    for i, expert in enumerate(experts.deepspeed_experts):
        expert.up.weight.data.copy_(up[first + i].T)
        expert.down.weight.data.copy_(down[first + i].T)
    made = MOELayer(router, experts, "experts", ranks, each)
    made._set_ep_group(dist.group.WORLD)
    return made
