"""Tensors for samples: random, small, float64."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard._torch.names import OpOverload


def real(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers; ``grad=False`` for a tensor that is written in place."""
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def positive(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers between 0.5 and 1.5."""
    return (torch.rand(shape, dtype=dtype) + 0.5).requires_grad_(grad)


def inside(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers between 0.1 and 0.9 (probabilities, arguments of asin and atanh)."""
    return (torch.rand(shape, dtype=dtype) * 0.8 + 0.1).requires_grad_(grad)


def distinct(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers no two of which are equal, in random order: for max, sort, topk."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count).to(dtype).reshape(shape) / 4 - count / 8).requires_grad_(grad)


def integers(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random integers from ``low`` up to, not including, ``high``."""
    return torch.randint(low, high, shape, dtype=dtype)


def mask(*shape: int) -> Tensor:
    """Random booleans."""
    return torch.rand(shape) < 0.5


def whole(op: OpOverload, *args: object) -> object:
    """A composite operator as DistTensors take it: given to the dispatch mode before torch takes it apart."""
    current, popped = _torch.whole_mode
    if current() is None:
        return op(*args)
    with popped() as mode:
        return mode.__torch_dispatch__(op, (), args, {})
