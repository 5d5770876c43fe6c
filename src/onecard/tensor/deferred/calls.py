"""What was done to deferred tensors: calls, and the memory that each of them reads and writes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onecard.rules.call import schema_of


@dataclass(frozen=True, slots=True)
class Slot:
    """A deferred tensor in a recorded call; tensors that share memory have one ``storage``."""

    number: int
    storage: int


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A recorded call: its arguments with slots for deferred tensors, and its results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[Slot, torch.Size, torch.dtype], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: bool  # overwrites all of one tensor's memory without a look at it


FILLS = ("zero_", "fill_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")


@dataclass(slots=True)
class DeferredCalls:
    """All calls on the tensors of one ``deferred_init``, also those after it."""

    nodes: list[DeferredCall] = field(default_factory=list)
    slots: dict[Any, Slot] = field(default_factory=dict)
    # Weak references keep the addresses of storages, by which they are known, from being used again.
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    laid_out: set[int] = field(default_factory=set)  # storages of which shard_tensor has made parts

    def slot(self, tensor: Tensor) -> Slot | None:
        """The slot of a tensor, if it is one of this record."""
        return self.slots.get(_identity(tensor))

    def add(self, tensor: Tensor) -> Slot:
        """The slot of a tensor, a new one if need be."""
        found = self.slot(tensor)
        if found is None:
            found = self.slots[_identity(tensor)] = Slot(len(self.slots), storage_of(tensor))
            if found.storage not in self.storages:
                self.storages[found.storage] = StorageWeakRef(tensor.untyped_storage())
                records[found.storage] = self
        return found

    def append(self, node: DeferredCall) -> None:
        """Note a call."""
        for storage in node.writes:
            self.writers[storage].append(len(self.nodes))
        self.nodes.append(node)

    def needed(self, storage: int) -> list[DeferredCall]:
        """The calls on which a tensor's memory depends, in order; not those that a later one overwrites."""
        wanted, lost, found = {storage}, set[int](), []
        ahead = [-i for i in self.writers[storage]]
        heapify(ahead)
        last = None
        while ahead:
            i = -heappop(ahead)
            node = self.nodes[i]
            if i == last or (schema_of(node.func).written and node.writes <= lost):
                continue
            last = i
            found.append(node)
            for new in node.reads - wanted:
                for writer in self.writers[new]:
                    if writer < i:
                        heappush(ahead, -writer)
            wanted |= node.reads
            if node.fills:
                lost |= node.writes
            else:
                lost -= node.reads  # what is read must be as it was then
        return found[::-1]


records: dict[int, DeferredCalls] = {}


def record_of(tensor: Tensor) -> DeferredCalls | None:
    """The record that knows a tensor."""
    return records.get(storage_of(tensor))


def is_any() -> bool:
    """Whether there is a deferred tensor."""
    return any(
        not ref.expired()
        for record in {id(r): r for r in records.values()}.values()
        for ref in record.storages.values()
    )


def forget_the_dead() -> None:
    """Drop the records of which no tensor is left."""
    for record in {id(r): r for r in records.values()}.values():
        if all(ref.expired() for ref in record.storages.values()):
            for storage in record.storages:
                del records[storage]


def storage_of(tensor: Tensor) -> int:
    """The address of what a tensor shares with its views."""
    return tensor.untyped_storage()._cdata


def _identity(tensor: Tensor) -> Any:
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
