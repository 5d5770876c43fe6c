"""Rows added to the rows that they are of, by number: each sum is written once, its rows are read once."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
_READ = (torch.float32, torch.float64)


def sums(values: Tensor, into: Tensor, size: int, arrived: Tensor | None = None) -> Tensor:
    """(rows, ...) -> (size, ...): row ``into[i]`` is the sum of the rows i that are of it, in order; else zeros.

    Args:
        arrived: for each of ``values`` which row i it is, if they lie in another order; None: they do not.

    Example:
        >>> sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 2]), 3).flatten().tolist()
        [2.0, 0.0, 5.0]
        >>> sums(torch.tensor([[4.0], [1.0], [2.0]]), torch.tensor([2, 0, 2]), 3, torch.tensor([2, 0, 1])).flatten().tolist()
        [2.0, 0.0, 5.0]
    """
    if not _is_read(values, size):
        at = into if arrived is None else into[arrived]
        return values.new_zeros(size, *values.shape[1:]).index_add_(0, at, values)
    order = torch.argsort(into, stable=True)
    if arrived is not None:
        order = inverse(arrived)[order]
    count = torch.bincount(into, minlength=size)
    rows = aten._embedding_bag_forward_only(values.reshape(len(values), -1), order, count.cumsum(0) - count, False, 0)
    return rows[0].view(size, *values.shape[1:])


def inverse(order: Tensor) -> Tensor:
    """Where each number stands in an order.

    Example:
        >>> inverse(torch.tensor([2, 0, 1])).tolist()
        [1, 2, 0]
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _is_read(values: Tensor, size: int) -> bool:
    """Whether torch reads rows in any order and sums them at once. On other devices sums of rows are atomic additions."""
    return values.device.type == "cpu" and values.dtype in _READ and values.numel() > 0 and size > 0


def after(first: Tensor | None, order: Tensor | None) -> Tensor | None:
    """One order of rows after another; None: none."""
    if first is None or order is None:
        return order if first is None else first
    return first.index_select(0, order)
