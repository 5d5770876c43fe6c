"""What torch keeps of a leaf beside its numbers, past the properties that patches put in torch's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_grad: Any = torch._C.TensorBase.grad
_data: Any = vars(torch._C.TensorBase)["data"]
gradient: Callable[[Any], Any] = _grad.__get__  # whatever ``Tensor.grad`` is (fleet/gradients/hooks.py)
set_gradient: Callable[[Any, Tensor | None], None] = _grad.__set__
set_data: Callable[[Any, Tensor], None] = _data.__set__  # whatever ``Tensor.data`` is (tensor/become.py)


def outside_transforms() -> Any:
    """Within ``torch.func.grad``, ``vmap``: what is done here is none of theirs."""
    return torch._C._DisableFuncTorch()
