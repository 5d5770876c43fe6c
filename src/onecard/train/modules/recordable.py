"""What modules of torch do with values of tensors, and how they do it while a step is recorded: so that a replay does it, too."""

from __future__ import annotations

from collections.abc import Iterator
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
    with patch.object(batchnorm, "float", _number, create=True), transformer.recordable():
        yield


def _number(x: Any) -> Any:
    """``float(counter)``, which Python makes a plain float of, whatever the counter gives."""
    return x.double().item() if isinstance(x, Tensor) else float(x)
