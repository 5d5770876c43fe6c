"""Gradients of ``nn.Embedding(sparse=True)``: the rows that any rank has are gathered, so that they stay few."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks


def reduce(grads: list[Tensor], group: Ranks, op: str) -> None:
    """Sum sparse gradients over a group, or average them, in place."""
    for grad in grads:
        mine = grad.coalesce()
        rows = torch.tensor([mine.values().shape[0]], device=grad.device)
        sizes = plain.all_gather(rows, group, call="gradients, sparse rows").tolist()
        at = plain.all_gather(mine.indices(), group, 1, sizes, call="gradients, sparse rows")
        values = plain.all_gather(mine.values(), group, 0, sizes, call="gradients, sparse rows")
        if op == "avg":
            values = values / group.size
        grad.copy_(_torch.sparse(at, values, grad.shape).coalesce())


def empty_like(p: Tensor) -> Tensor:
    """No rows of a parameter: what a rank has that has not used it."""
    at = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return _torch.sparse(at, p.new_empty((0, *p.shape[1:])), p.shape)


def dense(grad: Tensor) -> Tensor:
    """What lays out gradients needs all rows."""
    return grad.to_dense() if grad.is_sparse else grad
