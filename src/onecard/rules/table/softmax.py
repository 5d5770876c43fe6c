"""Softmax and log-softmax. The dim stays whole; where it is cut, only maxima and sums travel, never the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature
from onecard.rules.table._share import cast, wide


def _along(call: Call, linear: str = "") -> Form:
    dims = names(call.results[0].dim())
    whole = dims[call.dim % len(dims)] if dims else ""
    return Form(signature([dims] * len(call.operands), [dims]), whole=whole, linear=linear)


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
    return cast(weighted - wide(output) * weighted.sum([dim], keepdim=True), input_dtype)


def _log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad = wide(grad_output)
    return cast(grad - wide(output).exp() * grad.sum([dim], keepdim=True), input_dtype)


def _safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax in which a row of nothing but -inf gives zeros."""
    x = self if dtype is None else cast(self, dtype)
    nothing = (x == float("-inf")).all(dim, keepdim=True)
    return _softmax(x, dim, False).masked_fill(nothing, 0.0)


row("_softmax", instead=_softmax)(_along)
row("_log_softmax", instead=_log_softmax)(_along)
row("_safe_softmax", instead=_safe_softmax)(_along)


@row("_softmax_backward_data", instead=_softmax_backward)
def _backward(call: Call) -> Form:
    return _along(call, linear="grad_output")


@row("_log_softmax_backward_data", instead=_log_softmax_backward)
def _log_backward(call: Call) -> Form:
    return _along(call, linear="grad_output")
