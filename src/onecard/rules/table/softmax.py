"""Softmax and log-softmax. The dim stays whole; where it is cut, only maxima and sums travel, never the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.rules.registry import row
from onecard.rules.table._share import cast, wide


def _shifted(x: Tensor, dim: int) -> Tensor:
    """The logits minus their largest, so that no exponential overflows."""
    return x - x.amax([dim], keepdim=True) if x.numel() else x.clone()


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    e = _shifted(wide(self), dim).exp_()
    return cast(e.div_(e.sum([dim], keepdim=True)), torch.float32 if half_to_float else self.dtype)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = _shifted(wide(self), dim)
    total = shifted.exp().sum([dim], keepdim=True)
    return cast(shifted.sub_(total.log()), torch.float32 if half_to_float else self.dtype)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    weighted = wide(grad_output) * wide(output)
    return cast(weighted.sub_(wide(output) * weighted.sum([dim], keepdim=True)), input_dtype)


def _log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad = wide(grad_output)
    taken = wide(output).exp().mul_(grad.sum([dim], keepdim=True))  # one copy of what is many a model's largest
    return cast(taken.neg_().add_(grad), input_dtype)


def _safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax in which a row of nothing but -inf gives zeros."""
    x = self if dtype is None else cast(self, dtype)
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return _softmax(x, dim, False).masked_fill(nothing, 0.0)


row("_softmax", "... dim:s -> ... dim:s", whole="s", instead=_softmax)
row("_log_softmax", "... dim:s -> ... dim:s", whole="s", instead=_log_softmax)
row("_safe_softmax", "... dim:s -> ... dim:s", whole="s", instead=_safe_softmax)

_BACKWARD = "... dim:s, ... dim:s -> ... dim:s"
row("_softmax_backward_data", _BACKWARD, whole="s", linear="grad_output", instead=_softmax_backward)
row("_log_softmax_backward_data", _BACKWARD, whole="s", linear="grad_output", instead=_log_softmax_backward)
