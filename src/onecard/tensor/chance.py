"""Random operators: every rank draws the whole tensor from torch's generator and keeps its part.

So a program draws the numbers that it draws on one card, under every layout, provided that all ranks are seeded alike;
each rank pays the time of the whole draw. The generators of all ranks stay in step, those outside the mesh included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.tensor.dispatch import handle
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.spec import Spec

aten = torch.ops.aten

_IN_PLACE = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_LIKE = ("rand_like", "randn_like", "randint_like")


def _part(whole: Tensor, x: DistTensor) -> Tensor:
    slices = x._spec.layout.local_slices(whole.shape)
    return whole[slices].clone(memory_format=torch.contiguous_format) if x._spec.here else x._local


def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    """x.normal_() and its kin: draw the whole, write this rank's part."""
    x, *rest = args
    x.settle()
    whole = torch.empty(x.shape, dtype=x.dtype, device=x._spec.device)
    whole = func(whole, *[_gathered(a) for a in rest], **kwargs)
    x._local.copy_(_part(whole, x))
    return x


def _gathered(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DistTensor) else value


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """rand_like(x) and its kin: in the layout of x."""
    x, *rest = args
    kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "memory_format")}
    whole = func(torch.empty(x.shape, dtype=x.dtype, device=x._spec.device), *rest, **kwargs)
    return _as(whole, x)


def _as(whole: Tensor, x: DistTensor) -> DistTensor:
    spec = Spec.like(x._spec.layout.settled(), whole, x._spec.device)
    return wrap(_part(whole, x), spec)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """bernoulli(x) and bernoulli(x, p): with probabilities from x they must be whole to be drawn whole."""
    x, *rest = args
    x.settle()
    probabilities = x.full_tensor() if not rest else torch.empty(x.shape, dtype=x.dtype, device=x._spec.device)
    return _as(func(probabilities, *rest, **kwargs), x)


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """native_dropout(x, p, train) -> (result, mask)."""
    x, p, train = args
    x.settle()
    whole, mask = func(torch.ones(x.shape, dtype=x.dtype, device=x._spec.device), p, train, **kwargs)
    scaled = _as(whole, x)
    result = wrap(x._local * scaled._local, x._spec)
    return result, _as(mask, x)


def _register() -> None:
    for names, handler in (
        (_IN_PLACE, _fill),
        (_LIKE, _like),
        (("bernoulli",), _bernoulli),
        (("native_dropout",), _dropout),
    ):
        for name in names:
            packet = getattr(aten, name)
            for overload in packet.overloads():
                if "out" not in overload:
                    handle(getattr(packet, overload), handler)


_register()
