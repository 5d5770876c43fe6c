"""Which operator has made what lies in memory now: of a tensor's storage, or of the very stretch of it that a tensor is."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from onecard._torch import fakes
from onecard.comm.base import own
from onecard.tensor.dist_tensor import DistTensor

Source = tuple[int, int]
"""An operator by its number, and which of its values."""
Stretch = tuple[int, int]
"""First byte and the one behind the last."""


class Makers:
    """What has made which memory last.

    A stretch is known apart from the rest of its storage, as a parameter's part is in a bucket of many.

    Example:
        >>> import torch
        >>> bucket, known = torch.zeros(6), Makers()
        >>> known.note(bucket, (1, 0))
        >>> known.note(bucket[:2], (2, 0))
        >>> known.of(bucket[:2]), known.of(bucket[2:]), known.of(bucket)
        ((2, 0), (1, 0), (2, 0))
    """

    def __init__(self) -> None:
        self._last: dict[int, Source] = {}  # by storage
        self._whole: dict[int, Source] = {}  # the last that has made all of it
        self._stretches: dict[int, dict[Stretch, Source]] = {}

    def of(self, x: Tensor) -> Source | None:
        """What has made a tensor; None: nobody knows."""
        local = _local(x)
        storage, parts = _storage(local), self._stretches.get(_storage(local))
        if not parts:
            return self._last.get(storage)
        mine = _stretch(local)
        if mine is None:
            return self._last.get(storage)
        found = parts.get(mine)
        if found is None and not any(_meet(mine, other) for other in parts):
            return self._whole.get(storage, self._last.get(storage))
        return self._last.get(storage) if found is None else found

    def note(self, x: Tensor, source: Source) -> None:
        """An operator has made a tensor, or written to it."""
        local = _local(x)
        storage, mine = _storage(local), _stretch(local)
        self._last[storage] = source
        if mine is None or mine == (0, local.untyped_storage().nbytes()):
            self._stretches.pop(storage, None)
            self._whole[storage] = source
            return
        parts = self._stretches.setdefault(storage, {})
        for other in [other for other in parts if _meet(mine, other)]:
            del parts[other]
        parts[mine] = source

    def forget(self, x: Tensor) -> None:
        """Its memory is new, and holds nothing yet."""
        storage = _storage(_local(x))
        for known in (self._last, self._whole, self._stretches):
            known.pop(storage, None)


def _local(x: Tensor) -> Tensor:
    if own.is_under_way(type(x)):
        return x.elem  # type: ignore[attr-defined]
    return x._local if isinstance(x, DistTensor) else fakes.local_of(x) if isinstance(x, DTensor) else x


def storage_of(x: Tensor) -> int:
    """What tells the memory of a tensor's part from others that are there."""
    return _storage(_local(x))


def _storage(local: Tensor) -> int:
    """What tells the memory of a tensor from others that are there."""
    return int(local.untyped_storage()._cdata)


def _stretch(local: Tensor) -> Stretch | None:
    """Where in its storage a tensor lies, if it has all of that stretch."""
    if not local.is_contiguous():
        return None
    size = local.element_size()
    start = int(local.storage_offset()) * size
    return start, start + int(local.numel()) * size


def _meet(a: Stretch, b: Stretch) -> bool:
    return a[0] < b[1] and b[0] < a[1]
