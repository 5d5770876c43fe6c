"""A rank's part of each batch: which samples it reads, and which rows of what a ``collate_fn`` makes of them are its own.

As a rule a rank reads the samples of its part. Where a ``collate_fn`` pads to the longest sample that it is given, or makes
something of the batch as a whole, parts are none of it; once that is seen each rank reads whole batches, and keeps its rows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from onecard.errors import DispatchError
from onecard.place.parts import chunk
from onecard.train.data.order import LoaderOrder, PassOrder
from onecard.train.data.position import begun, skipped


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """One batch as it was asked for: the samples of the whole batch, this rank's rows of it, whether all of it was read."""

    indices: list[Any]
    start: int
    length: int
    whole: bool

    def of_all(self) -> ReadBatch:
        """The same, where all of the batch is read."""
        return replace(self, whole=True)

    def rows(self, batch: Any) -> Any:
        """This rank's rows of what was read; what has none is as it is, if all of the batch was read.

        Raises:
            DispatchError: a tensor of a part that has not one row for each sample.
        """
        return mapped(batch, self._rows)

    def _rows(self, value: Any) -> Any:
        size = len(self.indices) if self.whole else self.length or 1
        start = self.start if self.whole else 0
        if isinstance(value, list):  # names, say: one for each sample
            return value[start : start + self.length] if len(value) == size else value
        if not isinstance(value, Tensor):
            return value
        if self.whole:
            return value  # is cut where it is laid out
        if value.is_nested or value.dim() == 0 or value.shape[0] != size:
            found = "another kind" if value.is_nested else list(value.shape)
            raise DispatchError(
                f"shard_dataloader: a batch of {len(self.indices)} samples gave this rank a tensor of {found}, "
                f"not {[size, *([] if value.is_nested else value.shape[1:])]}; collate_fn must stack samples along dim 0"
            )
        return value[: self.length]


class PartSampler:
    """This rank's part of each batch of indices; all of it once ``whole`` is set."""

    def __init__(self, batches: Any, parts: int, index: int, order: LoaderOrder) -> None:
        self.batches, self.parts, self.index, self.order = batches, parts, index, order
        self.before, self.whole = 0, False
        self.last: PartIndices

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> PartIndices:
        self.last = PartIndices(self, self.order.begin())
        return self.last


class PartIndices(Iterator[list[Any]]):
    """One pass of a ``PartSampler``; ``reads`` has what was sampled and not yet taken."""

    def __init__(self, sampler: PartSampler, order: PassOrder) -> None:
        self.sampler, self.order = sampler, order
        self.batches, self.before = iter(sampler.batches), sampler.before
        self.reads: deque[ReadBatch] = deque()
        self.begun = False

    def start(self) -> None:
        """Draw what the sampler draws at its first batch, where the loader has not asked for it yet; not before the loader has
        drawn what it draws itself."""
        if not self.begun:
            self.begun = True
            self.batches = skipped(begun(self.batches), self.before)

    def __next__(self) -> list[Any]:
        self.start()
        drawn = next(self.batches, None)
        if drawn is None:
            self.order.end()
            raise StopIteration
        indices = list(drawn)
        self.order.add(indices)
        start, length = chunk(len(indices), self.sampler.parts, self.sampler.index)
        self.reads.append(ReadBatch(indices, start, length, self.sampler.whole))
        # A rank whose part is empty reads one sample to learn its shape, and keeps none of it.
        return indices if self.sampler.whole else indices[start : start + length] or indices[:1]


def again(loader: DataLoader[Any], read: ReadBatch) -> Any:
    """The whole of a batch that was read in parts."""
    whole: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=[read.indices],
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(device="cpu"),  # what an iterator draws is not the program's
    )
    return next(iter(whole))


def iterates_itself(loader: Any) -> bool:
    """Whether a loader's class does something to batches where it is iterated over."""
    return type(loader).__iter__ is not DataLoader.__iter__


def reads_together(dataset: Any) -> bool:
    """Whether a dataset is given a batch's indices at once, and may look at the samples together."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def mapped(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """A batch with each of its leaves replaced: what is no mapping, no dataclass, no list or tuple with tensors inside."""
    if isinstance(batch, Mapping):
        return {key: mapped(value, leaf) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and any(map(_holds_tensors, batch)):
        made = [mapped(value, leaf) for value in batch]
        return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
    if _has_fields(batch):
        made_of = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made_of, field.name, mapped(getattr(batch, field.name), leaf))  # one that is frozen, too
        return made_of
    return leaf(batch)


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) or _has_fields(value)


__all__ = ["PartSampler", "ReadBatch", "again", "iterates_itself", "mapped", "reads_together"]
