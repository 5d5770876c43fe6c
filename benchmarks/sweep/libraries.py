"""The two libraries under test, seen alike: place a tensor, read the whole of a result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import onecard as oc
from onecard.errors import OnecardError
from onecard.tensor.dispatch import fallback


class Library(Protocol):
    """What the sweep asks of a library of distributed tensors."""

    tensor: type
    takes_plain: bool
    replays: bool
    refusals: tuple[type[BaseException], ...]

    def place(self, whole: Tensor, placement: Placement) -> Tensor: ...

    def whole(self, value: Any) -> Any: ...

    @contextmanager
    def watch(self) -> Iterator[set[str]]: ...


class Onecard:
    """onecard on a mesh of all ranks."""

    tensor = oc.DistTensor
    takes_plain = True
    replays = False
    refusals = (OnecardError,)

    def __init__(self) -> None:
        self.mesh = oc.ProcessMesh(list(range(dist.get_world_size())), ["x"])

    def place(self, whole: Tensor, placement: Placement) -> Tensor:
        return oc.shard_tensor(whole, self.mesh, [placement], requires_grad=whole.requires_grad)

    def whole(self, value: Any) -> Any:
        return value.detach().full_tensor()

    @contextmanager
    def watch(self) -> Iterator[set[str]]:
        """How operators without a row were run: "decomposed", "gathered"."""
        seen: set[str] = set()

        def note(event: fallback.FallbackCall) -> None:
            seen.add(event.how)

        fallback.observers.here.append(note)
        try:
            yield seen
        finally:
            fallback.observers.here.remove(note)


class OnecardMerged(Onecard):
    """onecard, with what is cut along a dim cut along the inner part of that dim instead, as after ``flatten``."""

    def place(self, whole: Tensor, placement: Placement) -> Tensor:
        size = whole.shape[placement.dim] if isinstance(placement, Shard) else 0
        outer = next((n for n in range(2, size) if size % n == 0), 0)
        if not outer or not isinstance(placement, Shard):
            return super().place(whole, placement)
        dim = placement.dim
        parts = oc.shard_tensor(whole.detach().unflatten(dim, (outer, -1)), self.mesh, [Shard(dim + 1)])
        return parts.flatten(dim, dim + 1).requires_grad_(whole.requires_grad)


class OnecardReplayed(Onecard):
    """onecard, each case as a recorded step: what a replay gives is compared, gradients and operands included."""

    replays = True


class TorchDTensor:
    """torch's own DTensor. Plain tensors are replicated first, as it wants its users to do."""

    tensor = DTensor
    takes_plain = False
    replays = False
    refusals = (NotImplementedError, RuntimeError)

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(self, whole: Tensor, placement: Placement) -> Tensor:
        placed = distribute_tensor(whole.detach(), self.mesh, [placement], src_data_rank=None)
        return placed.requires_grad_(whole.requires_grad)

    def whole(self, value: Any) -> Any:
        return value.detach().full_tensor()

    @contextmanager
    def watch(self) -> Iterator[set[str]]:
        yield set()


def make(name: str) -> Library:
    warnings.simplefilter("ignore")
    known = {
        "onecard": Onecard,
        "onecard merged": OnecardMerged,
        "onecard replayed": OnecardReplayed,
        "DTensor": TorchDTensor,
    }
    return known[name]()


def replicated(library: Library, whole: Tensor) -> Tensor:
    return library.place(whole, Replicate())
