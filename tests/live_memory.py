"""Bytes that are alive while a recording is replayed, counted: each memory once, from the operator that makes it to its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecard as oc


class Counted(TorchDispatchMode):
    """The most bytes alive at once, of ``inputs`` and of what operators make."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0
        self.look(inputs)

    def look(self, value: Any) -> None:
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {k: (ref, size) for k, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(result)
        return result


def measured_peak(recording: oc.Recording, *args: Any) -> int:
    """Of one replay, its inputs included."""
    leaves = torch.utils._pytree.tree_leaves(args)
    inputs = recording.bound.fits(leaves)
    assert inputs is not None
    counted = Counted(inputs)
    with torch.no_grad(), counted:
        recording.run(*inputs)
    return counted.peak
