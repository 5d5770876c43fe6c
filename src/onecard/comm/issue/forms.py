"""What collectives are called with: options of torch's, and tensors in a form that every backend moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard._torch.names import AllgatherOptions

REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def at_once(options: Any) -> Any:
    """Options of a call whose result is awaited right after: no need to hand it to another thread or stream."""
    options.asyncOp = False
    return options


def _options(op: str) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(REDUCE[op])
    return at_once(options)


OPTIONS = {op: _options(op) for op in REDUCE}
GATHER, EXCHANGE = at_once(AllgatherOptions()), at_once(dist.AllToAllOptions())
BARRIER = at_once(dist.BarrierOptions())

# Gloo moves these as they are; others travel as bytes, and are added in a wider or a real type.
NATIVE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    }
)  # fmt: skip


def moved(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory in a type that every backend moves."""
    return tensor if tensor.dtype in NATIVE else tensor.view(-1).view(torch.uint8)


def dense(tensor: Tensor) -> Tensor:
    """Contiguous, with a conjugation or a sign that torch has put off carried out."""
    return tensor.resolve_conj().resolve_neg().contiguous()
