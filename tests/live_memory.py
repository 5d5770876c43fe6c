"""Bytes alive while a step runs or a recording is replayed: each memory once, from the operator that makes it to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecard as oc


class Counted(TorchDispatchMode):
    """The most bytes alive at once, of ``inputs`` and of what operators make; of a distributed tensor, this rank's part."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.look(inputs)

    def look(self, value: Any) -> None:
        for x in tree_leaves(value):
            x = x._local if isinstance(x, oc.DistTensor) else x
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage)
        self.alive = {k: ref for k, ref in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(map(_size, self.alive.values())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, oc.DistTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.look(result)
        return result


def _size(ref: StorageWeakRef) -> int:
    """Now: a storage can be emptied and filled again."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()


def measured_peak(recording: oc.Recording, *args: Any) -> int:
    """Of one replay, its inputs included."""
    leaves = torch.utils._pytree.tree_leaves(args)
    inputs = recording.bound.ready(leaves)
    assert isinstance(inputs, tuple)
    counted = Counted(inputs)
    with torch.no_grad(), counted:
        recording.run(*inputs)
    return counted.peak


def eager_peak(step: Callable[..., Any], optimizer: torch.optim.Optimizer, held: Any, *args: Any) -> int:
    """Of a step as it is; ``held``: the parameters that modules have, besides those of the optimizer and its states."""
    counted = Counted([optimizer.param_groups, [*optimizer.state.values()], held, args])
    with counted:
        step(*args)
    return counted.peak
