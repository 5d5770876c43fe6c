"""poisson, binomial, _standard_gamma and _sample_dirichlet (torch.distributions is built on them): each rank its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.place.layout import Layout
from onecard.random import Key
from onecard.random.variates import variates
from onecard.recorded import is_sketching, unrecorded
from onecard.rules.call import arguments, schema_of
from onecard.tensor.dispatch.entries import handler
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.random_operators.draw import key_for
from onecard.tensor.spec import Spec, contiguous_stride

aten = torch.ops.aten


@handler(aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, draws=True)
def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Elements are independent: in the layout of the parameters."""
    given = arguments(func, args, kwargs)
    name = schema_of(func).name.removeprefix("_standard_")
    params = [given["self"]] if name != "binomial" else [given["count"], given["prob"]]
    with unrecorded():  # torch's own check of dtypes, which draws nothing; a replay would draw a key for it
        func(*[torch.empty(0, dtype=p.dtype, device="cpu") for p in params])
    like = params[0] if len(params) == 1 else params[0] + params[1]
    layout = like._spec.layout.reduced().in_one_piece() if isinstance(like, DistTensor) else None
    return _make(func, name, params, like.shape, layout, key_for(func, like, given["generator"]))


@handler(aten._sample_dirichlet.default, draws=True)
def _dirichlet(func: Any, args: Any, kwargs: Any) -> Any:
    """Gamma variates over the sum of their row, which each rank needs whole."""
    given = arguments(func, args, kwargs)
    x = given["self"]
    with unrecorded():
        func(torch.empty((0, 1), dtype=x.dtype, device="cpu"))
    layout = Layout.make(x.mesh, (*x._spec.layout.in_one_piece().dims[:-1], ())) if isinstance(x, DistTensor) else None
    return _make(func, "dirichlet", [x], x.shape, layout, key_for(func, x, given["generator"]))


def _make(func: Any, name: str, params: Sequence[Tensor], shape: torch.Size, layout: Layout | None, key: Key) -> Tensor:
    dtype = params[0].dtype
    if layout is None:
        return _part(name, [p.expand(shape) for p in params], key, shape, (0,) * len(shape)).to(dtype)
    device = next(p._spec.device for p in params if isinstance(p, DistTensor))
    spec = Spec.make(layout, shape, contiguous_stride(shape), dtype, device)
    locals_ = [_local(p.expand(shape), layout, schema_of(func).name) for p in params]
    if not spec.here:
        return wrap(torch.empty(0, dtype=dtype, device=device), spec)
    return wrap(_part(name, locals_, key, shape, layout.local_offset(shape)).to(dtype), spec)


def _local(x: Tensor, layout: Layout, name: str) -> Tensor:
    if isinstance(x, DistTensor):
        return x._become(layout, name, "parameter", "as the result lies", explicit=False)
    return x[layout.local_slices(x.shape)] if layout.mesh.coordinate() is not None else x


def _part(name: str, params: list[Tensor], key: Key, shape: torch.Size, offset: tuple[int, ...]) -> Tensor:
    if name == "poisson" and not (params[0].is_meta or is_sketching()) and bool((params[0] < 0).any()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    if name in ("poisson", "binomial"):
        return variates(name, params, key, shape, offset)
    tiny = torch.finfo(params[0].dtype).tiny  # as torch: zero has no logarithm
    gamma = variates("gamma", params, key, shape, offset).clamp_(min=tiny)
    if name == "gamma":
        return gamma
    below_one = 1 - torch.finfo(params[0].dtype).eps / 2
    return gamma.div_(gamma.sum(-1, keepdim=True)).clamp_(tiny, below_one)
