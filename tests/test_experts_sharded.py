"""``group_sharded_parallel`` beside experts and tensor parallelism: which expert has tokens differs from rank to rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onecard import fleet
from onecard.testing import run_ranks

WIDE, EXPERTS = 4, 4
TOKENS = {  # of both ranks along dp; along mp each rank sends half of them
    "each expert one token": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "one expert for nearly all": ([0, 0, 0, 1], [0, 0, 0, 0]),
    "others on each rank": ([0, 1, 2, 3], [0, 1, 2, 0]),
}


def trained(level: str | None, tokens: tuple[list[int], list[int]]) -> list[Tensor]:
    """Losses, and what the weights of this rank are in the end."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 2, "ep_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    group = fleet.get_hybrid_communicate_group()
    torch.manual_seed(0)
    gate = {"type": "topk", "top_k": 1, "normalize": False}
    experts = [fleet.LayerDesc(nn.Linear, WIDE, WIDE) for _ in range(EXPERTS)]
    moe = fleet.meta_parallel.MoELayer(WIDE, experts, gate, mp_group=group.get_model_parallel_group())
    with torch.no_grad():
        moe.gate.gate.weight.copy_(torch.eye(WIDE) * 3)  # token i goes to expert i
    net = nn.Sequential(moe, nn.Linear(WIDE, 2))
    model, optimizer = fleet.distributed_model(net), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if level is None:
        optimizer = fleet.distributed_optimizer(optimizer)
    else:
        model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
    x, losses = torch.eye(WIDE)[tokens[group.get_data_parallel_rank()]], []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses), model(x).detach()]


def levels(tokens: tuple[list[int], list[int]]) -> dict[str | None, list[Tensor]]:
    return {level: trained(level, tokens) for level in (None, "os", "p_g_os")}


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=[*TOKENS])
def test_experts_without_tokens_on_some_ranks(tokens: tuple[list[int], list[int]]) -> None:
    for found in run_ranks(levels, 4, tokens):
        for level in ("os", "p_g_os"):
            torch.testing.assert_close(found[level], found[None], rtol=1e-5, atol=1e-7)
