"""A mixture by hand on torch alone: grouped products between two all-to-alls; and experts cut as tensors, as DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def choose(x: Tensor, gate: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable experts of each token, and their weights."""
    weights, chosen = F.linear(x, gate).softmax(-1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, leave: list[int], come: list[int]) -> Tensor:
        ctx.sizes = (come, leave)
        made = rows.new_empty(sum(come), rows.shape[1])
        dist.all_to_all_single(made, rows.contiguous(), come, leave)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllToAll.apply(grads[0], *ctx.sizes), None, None


def by_hand(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, k: int, experts: int) -> Tensor:
    """(tokens, d) -> the same; ``up`` and ``down`` are this rank's experts."""
    ranks, each = dist.get_world_size(), up.shape[0]
    weights, chosen = choose(x, gate, k)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    come = arriving.view(ranks, each)
    sizes = torch.stack([counts.view(ranks, each).sum(1), come.sum(1)]).tolist()
    rows = _AllToAll.apply(x[order // k], *sizes)
    expert = torch.arange(each).repeat(ranks).repeat_interleave(come.flatten())
    by_expert = expert.argsort(stable=True)
    ends = come.sum(0).cumsum(0).int()
    made = F.grouped_mm(F.gelu(F.grouped_mm(rows[by_expert], up, offs=ends)), down, offs=ends)
    back = torch.empty_like(made).index_copy(0, by_expert, made)
    back = _AllToAll.apply(back, sizes[1], sizes[0])
    weighed = back * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, weighed)


def cut(weight: Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """Experts cut as tensors: each rank has a part of every one."""
    return DTensor.from_local(weight.chunk(mesh.size(), dim)[mesh.get_rank()].contiguous(), mesh, [Shard(dim)])


def as_tensors(x: Tensor, gate: Tensor, up: DTensor, down: DTensor, k: int, mesh: DeviceMesh) -> Tensor:
    """The same, with all tokens on each rank and a part of every expert; ``up`` and ``down`` as ``cut`` gives them."""
    all_tokens = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    tokens = all_tokens.to_local(grad_placements=[Partial()])
    weights, chosen = choose(tokens, gate, k)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=up.shape[0]).cumsum(0).int()
    made = F.grouped_mm(F.gelu(F.grouped_mm(tokens[order // k], up.to_local(), offs=ends)), down.to_local(), offs=ends)
    weighed = made * weights.flatten()[order, None]
    out = torch.zeros_like(tokens).index_add(0, order // k, weighed)
    return DTensor.from_local(out, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
