"""What torch keeps of a leaf beside its numbers, past the properties that patches put in torch's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _past_patches(method: Callable[..., Any]) -> Callable[..., Any]:
    """Under a mode torch would call a property by its name, and so the patched one."""

    def call(*args: Any) -> Any:
        if not torch._C._is_torch_function_mode_enabled():
            return method(*args)
        with torch._C.DisableTorchFunction():
            return method(*args)

    return call


_grad: Any = torch._C.TensorBase.grad
_data: Any = vars(torch._C.TensorBase)["data"]
gradient = _past_patches(_grad.__get__)  # whatever ``Tensor.grad`` is (fleet/gradients/hooks.py)
set_gradient = _past_patches(_grad.__set__)
set_data: Callable[[Any, torch.Tensor], None] = _data.__set__  # whatever ``Tensor.data`` is (tensor/become.py)
