"""Global indices on one rank's part of an indexed dim: shifted by its offset, and told which of them lie elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.rules.local import Local


def shift(c: Local, factor: str, index: Tensor, negative: bool = False) -> tuple[Tensor, Tensor]:
    """Local index and whether it lies on another rank (such entries read 0).

    Raises:
        RuntimeError: an index out of the whole range, which on one card is an error too, and must not pass for one that
            lies on another rank. On a GPU it comes when the stream gets there.
    """
    (offset, length), size = c.span(factor), c.size(factor)
    if negative:
        index = torch.where(index < 0, index + size, index)
    inside = (index >= 0) & (index < size)
    torch.ops.aten._assert_async.msg(
        inside.all(), f"{c.call.schema.name}: an index is out of range for a dim of size {size}"
    )
    here = (index >= offset) & (index < offset + length)
    return torch.where(here, index - offset, 0), ~here


def with_spare(x: Tensor, dim: int) -> Tensor:
    """The tensor with one more slot along a dim, for what belongs to other ranks."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)
