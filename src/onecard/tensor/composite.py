"""Composite operators of torch that DistTensors take over before torch decomposes them.

``__torch_dispatch__`` sees what a composite operator is made of, and so too late: channel dropout has made its noise as
a plain tensor by then, and attention has folded batch and heads. DistTensors carry a dispatch key besides that of their
device (``PrivateUse3``, which no backend uses). What is registered for its autograd sees them, and only them: on plain
tensors every operator of torch runs as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecard.layout import Layout
from onecard.tensor.dispatch import handle
from onecard.tensor.replay import empty

_library = torch.library.Library("aten", "IMPL")  # a registration lives as long as its library


def take_over(func: Any, function: Callable[..., Any]) -> None:
    """Run a composite operator on DistTensors by a function of its arguments, above autograd.

    Args:
        func: an overload, such as ``torch.ops.aten.feature_dropout.default``. ``func.decompose(...)`` is torch's own.
        function: made of differentiable operators.
    """
    _library.impl(func.name().removeprefix("aten::"), function, "AutogradPrivateUse3")
    # In inference mode there is no autograd above __torch_dispatch__.
    handle(func, lambda func, args, kwargs: function(*args, **kwargs))


def _noise(x: Tensor, p: float) -> Tensor:
    """For each sample and channel whether it stays; each rank those of its part."""
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    lead: Any = x
    layout = Layout.make(lead.mesh, (*lead._spec.layout.dims[:2], *[()] * (x.dim() - 2)))
    return empty((*x.shape[:2], *[1] * (x.dim() - 2)), layout, x.dtype).bernoulli_(1 - p)


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return x * _noise(x, p).div_(1 - p)


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropped channels take the value that keeps mean and variance of self-normalising networks (Klambauer et al., 2017)."""
    noise = _noise(x, p)
    low = 1.7580993408473766  # minus SELU's limit for negative inputs
    a = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    shift = noise.add(-1).mul_(low * a).add_(low * a * p)
    return x * noise.mul_(a) + shift


def _of_channels(name: str, drop: Callable[[Tensor, float, bool], Tensor]) -> None:
    for func, in_place in ((getattr(torch.ops.aten, name), False), (getattr(torch.ops.aten, name + "_"), True)):

        def run(
            x: Tensor, p: float, train: bool, decompose: Any = func.default.decompose, in_place: bool = in_place
        ) -> Tensor:
            if not train or not 0 < p < 1 or not x.numel():
                return decompose(x, p, train)
            result = drop(x, p, train)
            return x.copy_(result) if in_place else result

        take_over(func.default, run)


_of_channels("feature_dropout", _feature_dropout)
_of_channels("feature_alpha_dropout", _feature_alpha_dropout)
