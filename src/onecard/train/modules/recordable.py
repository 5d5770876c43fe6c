"""What modules of torch do with values of tensors, and how they do it while a step is recorded: so that a replay does it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn.modules import batchnorm

from onecard.train.modules import transformer


@contextmanager
def recordable() -> Iterator[None]:
    """Inside, batch norm's count of batches is read as a number that may be another one at each replay, and encoders in
    evaluation take the path that they take without an onlooker (``transformer.recordable``)."""
    sync = patch.object(batchnorm.SyncBatchNorm, "forward", _cumulative(batchnorm.SyncBatchNorm.forward))
    with patch.object(batchnorm, "float", _number, create=True), sync, transformer.recordable():
        yield


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
