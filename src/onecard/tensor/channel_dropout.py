"""Dropout of whole channels (dropout1d to 3d, feature_alpha_dropout): each rank draws for the samples and channels of its part.

Torch draws one number for each sample and channel into a plain tensor while it takes these operators apart; hence they are
intercepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from onecard.layout import Layout
from onecard.tensor.intercept import intercept, onward
from onecard.tensor.replay import empty


def _noise(x: Tensor, p: float) -> Tensor:
    """For each sample and channel whether it stays; each rank those of its part."""
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    lead: Any = x
    layout = Layout.make(lead.mesh, (*lead._spec.layout.dims[:2], *[()] * (x.dim() - 2)))
    return empty((*x.shape[:2], *[1] * (x.dim() - 2)), layout, x.dtype).bernoulli_(1 - p)


def _feature_dropout(x: Tensor, p: float) -> Tensor:
    return x * _noise(x, p).div_(1 - p)


def _feature_alpha_dropout(x: Tensor, p: float) -> Tensor:
    """Dropped channels take the value that keeps mean and variance of self-normalising networks (Klambauer et al., 2017)."""
    noise = _noise(x, p)
    low = 1.7580993408473766  # minus SELU's limit for negative inputs
    a = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    shift = noise.add(-1).mul_(low * a).add_(low * a * p)
    return x * noise.mul_(a) + shift


def _take_over(op: Any, drop: Callable[[Tensor, float], Tensor], in_place: bool) -> None:
    def kernel(keyset: DispatchKeySet, x: Tensor, p: float, train: bool) -> Tensor:
        if not train or not 0 < p < 1 or not x.numel():
            return onward(op, keyset, x, p, train)
        result = drop(x, p)
        return x.copy_(result) if in_place else result

    intercept(op, kernel)


for _name, _drop in (("feature_dropout", _feature_dropout), ("feature_alpha_dropout", _feature_alpha_dropout)):
    _take_over(getattr(torch.ops.aten, _name).default, _drop, in_place=False)
    _take_over(getattr(torch.ops.aten, _name + "_").default, _drop, in_place=True)
