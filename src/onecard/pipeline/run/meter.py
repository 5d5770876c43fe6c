"""Meter: how many bytes autograd keeps for the backwards of a pipeline's stages, now and at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onecard.tensor.dist_tensor import DistTensor


class _Saved:
    """A tensor that autograd keeps; when autograd drops this, it is not counted any more."""

    __slots__ = ("_meter", "tensor")

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self._meter, self.tensor = meter, tensor.detach()  # an output would hold the node that saves it
        meter.add(tensor)

    def __del__(self) -> None:
        self._meter.drop(self.tensor)


class Meter:
    """Counts the memory of what is saved for backward; each memory once, however many operators save it.

    Set it as ``runner.meter`` before a step. What the stages' parameters occupy is not counted.

    Attributes:
        now, peak: bytes.
        stages: for each stage the bytes that one forward added.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.now = self.peak = 0
        self.stages: dict[int, int] = {}
        self._left_out = {_memory(p).data_ptr() for p in parameters}
        self._batch: set[int] = set()
        self._users: dict[int, int] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of these: the batch, which is there anyway."""
        self._batch = {_memory(x).data_ptr() for x in tensors}

    def add(self, tensor: Tensor) -> None:
        """One more that keeps this memory."""
        storage = _memory(tensor)
        at = storage.data_ptr()
        if at in self._left_out or at in self._batch:
            return
        self._users[at] = self._users.get(at, 0) + 1
        if self._users[at] == 1:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def drop(self, tensor: Tensor) -> None:
        """One less."""
        storage = _memory(tensor)
        at = storage.data_ptr()
        if at in self._users:
            self._users[at] -= 1
            if not self._users[at]:
                del self._users[at]
                self.now -= storage.nbytes()

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Inside, a stage's forward runs."""
        before = self.now
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _Saved(self, x), lambda saved: saved.tensor):
            yield
        self.stages[stage] = max(self.stages.get(stage, 0), self.now - before)


def _memory(x: Tensor) -> torch.UntypedStorage:
    """Of this rank."""
    return (x._local if isinstance(x, DistTensor) else x).untyped_storage()
