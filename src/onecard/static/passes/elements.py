"""Which elements of one memory views have, by their sizes and strides. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def moves_nothing(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether ``as_strided`` leaves each element where it is: dims of one element have any stride."""
    same = all(n == 1 or a == b for n, a, b in zip(size, x.stride(), stride, strict=False))
    return [*size] == [*x.shape] and same and offset in (None, x.storage_offset())


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Whether two views of one memory are of the same elements, in any shape without gaps."""
    dims = [sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1) for t in (x, y)]
    whole = x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous()
    return x.storage_offset() == y.storage_offset() and (whole or dims[0] == dims[1])


def are_apart(x: Tensor, y: Tensor) -> bool:
    """Whether two views of one memory, of one shape, have no element in common: parts of one tensor, side by side."""
    if (x.shape, x.stride()) != (y.shape, y.stride()):
        return False
    dims = sorted(((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1), reverse=True)
    nested = all(s > sum((n - 1) * t for t, n in dims[i + 1 :]) for i, (s, _) in enumerate(dims))
    return nested and not _meet(int(x.storage_offset() - y.storage_offset()), dims)


def _meet(way: int, dims: list[tuple[int, int]]) -> bool:
    if not dims:
        return way == 0
    (stride, count), *rest = dims
    steps = {way // stride, -(-way // stride)}
    return any(abs(n) < count and _meet(way - n * stride, rest) for n in steps)
