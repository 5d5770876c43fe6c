"""Dropout of whole channels: F.dropout1d, 2d, 3d, feature_alpha_dropout. Each rank draws for its samples and channels.

Torch makes the noise of these composite operators, one number for a sample and channel, as a plain tensor. So they are
intercepted. Plain tensors under ``one_card_random`` draw the same by torch's own code: its noise has the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import DispatchKeySet
from onecard.place.layout import Layout
from onecard.tensor.deferred.replay import empty
from onecard.tensor.dispatch.entries import whole
from onecard.tensor.dispatch.intercept import onward

aten = torch.ops.aten
Drop = Callable[[Tensor, float], Tensor]


def _noise(x: Tensor, p: float) -> Tensor:
    """1 for each sample and channel that stays, else 0; in the layout of x."""
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    lead: Any = x
    ones = x.dim() - 2
    layout = Layout.make(lead.mesh, (*lead._spec.layout.in_one_piece().dims[:2], *[()] * ones))
    return empty((*x.shape[:2], *[1] * ones), layout, x.dtype).bernoulli_(1 - p)


def _feature_dropout(x: Tensor, p: float) -> Tensor:
    return x * _noise(x, p).div_(1 - p)


def _feature_alpha_dropout(x: Tensor, p: float) -> Tensor:
    """Dropped channels take the value that keeps mean and variance of self-normalising networks (Klambauer et al., 2017)."""
    noise = _noise(x, p)
    low = 1.7580993408473766  # minus SELU's limit for negative inputs
    a = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    shift = noise.add(-1).mul_(low * a).add_(low * a * p)
    return x * noise.mul_(a) + shift


def _kernel(func: Any, drop: Drop, in_place: bool) -> Callable[..., Tensor]:
    def run(keyset: DispatchKeySet, x: Tensor, p: float, train: bool) -> Tensor:
        if not train or not 0 < p < 1 or not x.numel():
            return onward(func, keyset, x, p, train)
        result = drop(x, p)
        return x.copy_(result) if in_place else result

    return run


for _name, _drop in (("feature_dropout", _feature_dropout), ("feature_alpha_dropout", _feature_alpha_dropout)):
    for _suffix in ("", "_"):
        _func = getattr(aten, _name + _suffix).default
        whole(_func)(_kernel(_func, _drop, bool(_suffix)))
