"""What several test files of checkpoints need: deep equality, and a count of the bytes that are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onecard as oc
from onecard.checkpoint.reader.reading import Reader


def equal(a: Any, b: Any) -> bool:
    """Deep equality, tensors by bits, dtypes and types included."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(oc.unshard(a.detach()), oc.unshard(b.detach()))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def counted(act: Any) -> int:
    """Bytes that are read meanwhile."""
    total, before = [0], Reader._fill

    def fill(self: Reader, file: Any, data: memoryview, offset: int) -> None:
        total[0] += data.nbytes
        before(self, file, data, offset)

    Reader._fill = fill  # type: ignore[method-assign]
    try:
        act()
    finally:
        Reader._fill = before  # type: ignore[method-assign]
    return total[0]
