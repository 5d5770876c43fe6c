"""Functions of torch that copy a tensor without asking its class: told of those that have no memory here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch import patches

_COPIES = {"tensor": ("data", True), "as_tensor": ("data", False), "asarray": ("obj", False)}
"""Of ``torch``: the name of what is copied, and whether it always is."""


def seen(kind: type[Tensor]) -> None:
    """From now on, a copy of a tensor of this kind is made by its own operators."""
    for name, (taken, always) in _COPIES.items():

        def make(torchs: Any, taken: str = taken, always: bool = always) -> Callable[..., Any]:
            def copying(*args: Any, **kwargs: Any) -> Any:
                x = args[0] if args else kwargs.get(taken)
                if not isinstance(x, kind) or recorded.recorder is not None:
                    return torchs(*args, **kwargs)
                asked = {k: v for k, v in kwargs.items() if k != taken}
                if len(args) > 1:  # as_tensor's dtype and device have places
                    asked |= dict(zip(("dtype", "device"), args[1:], strict=False))
                return _copy(x, **({"copy": always} | asked))

            return copying

        patches.replace(f"torch.{name}", torch, name, make)

    def make_new(torchs: Any) -> Callable[..., Any]:
        def new_tensor(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.get("data")
            if not isinstance(x, kind) or recorded.recorder is not None:
                return torchs(self, *args, **kwargs)
            asked: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
            return _copy(x, **(asked | {k: v for k, v in kwargs.items() if k != "data"}))

        return new_tensor

    patches.replace("torch.Tensor.new_tensor", torch.Tensor, "new_tensor", make_new)


def _copy(
    x: Tensor, dtype: torch.dtype | None = None, device: Any = None, *, copy: bool | None = True, requires_grad: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    made = x.detach()
    if device is not None and torch.device(device) != x.device:
        made = made.to(device)
    if dtype not in (None, made.dtype):
        made = made.to(dtype)
    elif copy:
        made = made.clone()
    return made.requires_grad_() if requires_grad else made
