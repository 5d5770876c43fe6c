"""What modules of torch do with values of tensors, and how they do it while a step is recorded: so that a replay does it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.modules import batchnorm
from torch.overrides import TorchFunctionMode

from onecard.recorded import asked_gradient
from onecard.train.modules import transformer
from onecard.train.zero import blocks


@contextmanager
def recordable() -> Iterator[None]:
    """Inside, batch norm's count of batches is read as a number that may be another one at each replay, and encoders in
    evaluation take the path that they take without an onlooker (``transformer.recordable``); ``one_hot`` of a number of classes
    does not look at the largest one on the host; parts of parameters (ZeRO) end with what was written to wholes."""
    sync = patch.object(batchnorm.SyncBatchNorm, "forward", _cumulative(batchnorm.SyncBatchNorm.forward))
    with patch.object(batchnorm, "float", _number, create=True), sync, transformer.recordable(), _Unread():
        yield
        blocks.written_back()


_grad: Any = Tensor.grad


class _Unread(TorchFunctionMode):
    """Functions that read values only to refuse some, written as operators of which one refuses them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _grad.__get__:
            asked_gradient(args[0])
        if func is torch.nn.functional.one_hot and _is_counted(*args, **(kwargs or {})):
            func = _one_hot
        return func(*args, **(kwargs or {}))


def _is_counted(tensor: Any, num_classes: Any = -1) -> bool:
    return type(tensor) is Tensor and tensor.dtype is torch.int64 and type(num_classes) is int and num_classes > 0


def _one_hot(tensor: Tensor, num_classes: int) -> Tensor:
    """What torch's kernel for CPUs does after it has looked at the largest class: ``scatter_`` refuses one that is too large."""
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def _cumulative(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``SyncBatchNorm.forward``, which asks its count by ``item()``, with ``momentum=None``: a plain int, the same for ever."""

    def run(self: Any, input: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return forward(self, input)
        self.momentum = 1.0 / _number(self.num_batches_tracked + 1)
        try:
            return forward(self, input)
        finally:
            self.momentum = None

    return run


def _number(x: Any) -> Any:
    """``float(counter)``, which Python makes a plain float of, whatever the counter gives."""
    return x.double().item() if isinstance(x, Tensor) else float(x)
