"""Results of a replay that had a graph of autograd behind them in the program: a second backward pass is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.errors import RecordingError


class _Spent(torch.autograd.Function):
    """A result whose backward pass the recording contains."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise RecordingError(
            "backward through the result of a recording: its own backward pass ran inside, or was never recorded. Call "
            "backward() inside the recorded step, and return what you only look at as loss.detach()"
        )


_ANCHOR = torch.zeros((), requires_grad=True, device="cpu")


def spent(x: Tensor) -> Any:
    """A result as the program has it: with a graph of autograd behind it, which cannot be used again."""
    return _Spent.apply(_ANCHOR, x) if torch.is_grad_enabled() else x
