"""Reductions: each rank reduces its part, and what it gives is pending until somebody needs it whole."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature
from onecard.rules.table._share import cast, if_empty, scaled, share, sums, wide, widens

aten = torch.ops.aten


_REDUCED = "... dim:r -> ... dim:- *"


# ---- Sums


@row("sum")
def _sum(call: Call) -> Form:
    return Form(_REDUCED, linear="self" if sums(call.self.dtype, call.results[0].dtype) else "")


row("count_nonzero", _REDUCED)


@row("nansum")
def _nansum(call: Call) -> str | None:
    """The meta function is wrong for an empty list (torch 2.13), so then there is no rule."""
    return None if call.dim == [] else _REDUCED


def _mean_of_part(c: Local) -> None:
    """A mean over a part counts for as much as the part is of the whole."""
    scaled(c, share(c) / share_of_result(c))


def share_of_result(c: Local) -> float:
    """Which part of the result's elements this rank holds (1 if that is none at all)."""
    whole, part = prod(c.call.results[0].shape), prod(c.result_shape())
    return part / whole if part else 1.0


@row("mean", local=_mean_of_part, positions="")
def _mean(call: Call) -> Form:
    return Form(_REDUCED, linear="self" if widens(call.self.dtype, call.results[0].dtype) else "")


@row("prod")
def _prod(call: Call) -> Form:
    keeps = "product" if widens(call.self.dtype, call.results[0].dtype) else ""
    return Form(_REDUCED, reduce="product", keeps=keeps)


# ---- Extremes


row("amax", _REDUCED, reduce="max", keeps="max", local=if_empty, positions="", any_rows=True)
row("amin", _REDUCED, reduce="min", keeps="min", local=if_empty, positions="", any_rows=True)
row("aminmax", "... dim:r -> ... dim:-, ... dim:-", reduce=("min", "max"), local=if_empty, positions="", any_rows=True)
row("any", _REDUCED, reduce="max")
row("all", _REDUCED, reduce="min")
row("_is_any_true", "... -> ()", reduce="max")
row("_is_all_true", "... -> ()", reduce="min")


# ---- Extremes with their places: found by comparing with the extreme, so that only small maxima travel


def _first_place(x: Tensor, extreme: Tensor, places: Tensor, dims: list[int], keepdim: bool, size: int) -> Tensor:
    """The smallest place where the extreme stands (NaN counts as the extreme, as in the kernels)."""
    hit = x == extreme
    if x.is_floating_point():
        hit = hit.logical_or_(x.isnan())
    return torch.where(hit, places, torch.tensor(size, device=places.device)).amin(dims, keepdim=keepdim)


def _along(dim: int, x: Tensor) -> Tensor:
    """0, 1, 2, ... along a dim."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.arange(x.shape[dim], device=x.device).view(shape)


def _with_place(extreme: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        dim %= self.dim()
        value = extreme(self, [dim], keepdim=True)
        place = _first_place(self, value, _along(dim, self), [dim], keepdim, self.shape[dim])
        return value if keepdim else value.squeeze(dim), place

    return run


def _place(extreme: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            dim %= self.dim()
            value = extreme(self, [dim], keepdim=True)
            return _first_place(self, value, _along(dim, self), [dim], keepdim, self.shape[dim])
        dims = list(range(self.dim()))
        places = torch.zeros_like(self, dtype=torch.int64)
        for d in dims:
            places = places + _along(d, self) * prod(self.shape[d + 1 :])
        return _first_place(self, extreme(self, dims, keepdim=True), places, dims, keepdim, self.numel())

    return run


def _extreme(call: Call, op: str) -> Form:
    if call.schema.overload == "other":
        return Form("..., ... -> ...")
    return Form(_REDUCED, whole="r") if call.schema.overload == "dim" else Form(_REDUCED, reduce=op, keeps=op)


@row("max", local=if_empty, positions="", any_rows=True, instead=_with_place(torch.amax))
def _max(call: Call) -> Form:
    return _extreme(call, "max")


@row("min", local=if_empty, positions="", any_rows=True, instead=_with_place(torch.amin))
def _min(call: Call) -> Form:
    return _extreme(call, "min")


row("argmax", _REDUCED, whole="r", instead=_place(torch.amax))
row("argmin", _REDUCED, whole="r", instead=_place(torch.amin))
row("median nanmedian mode kthvalue", _REDUCED, whole="r")


# ---- Variance: two passes, as one pass over squares would cancel


def _moments(x: Tensor, dim: Any, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    size = prod(x.shape[d] for d in dims)
    mean = wide(x).mean(dims, keepdim=True)
    centred = wide(x) - mean
    square = centred * centred if not x.is_complex() else centred.abs() ** 2
    left = size - (1 if correction is None else correction)
    var = square.sum(dims, keepdim=keepdim) / max(left, 0)
    return var, mean if keepdim else mean.view([n for n, d in zip(x.shape, _reduced(x, dims), strict=True) if not d])


def _reduced(x: Tensor, dims: list[int]) -> list[bool]:
    listed = {d % x.dim() for d in dims} if x.dim() else set()
    return [d in listed for d in range(x.dim())]


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _var(self: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return cast(_moments(self, dim, correction, keepdim)[0], _real(self.dtype))


def _std(self: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return cast(_moments(self, dim, correction, keepdim)[0].sqrt(), _real(self.dtype))


def _var_mean(
    self: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return cast(var, _real(self.dtype)), cast(mean, self.dtype)


def _std_mean(
    self: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _moments(self, dim, correction, keepdim)
    return cast(var.sqrt(), _real(self.dtype)), cast(mean, self.dtype)


for _name, _function in (("var", _var), ("std", _std), ("var_mean", _var_mean), ("std_mean", _std_mean)):
    row(f"{_name}.correction", _REDUCED, whole="r", instead=_function, local=if_empty, positions="", any_rows=True)


# ---- Norms: a norm of norms is a norm, so a pending norm passes through


def _power(call: Call) -> float:
    given = call.ord if "ord" in call.schema.arguments else call.values.get("p", 2)
    return 2.0 if given is None else float(given)


@row("linalg_vector_norm norm", local=if_empty, positions="", any_rows=True, values=True)
def _norm(call: Call) -> Form:
    power = _power(call)
    if power == 0:
        return Form(_REDUCED)  # the count of what is not zero
    if abs(power) == inf:
        return Form(_REDUCED, reduce="max" if power > 0 else "min")
    return Form(_REDUCED, reduce=f"norm{power}", keeps=f"norm{power}")


@row("renorm_", values=True)
def _renorm(call: Call) -> Form:
    """Each slice along the dim has its own norm. (Out of place PyTorch's decomposition sends only the norms.)"""
    dims = ["_"] * call.self.dim()
    dims[call.dim] = "s"
    return Form(signature([dims], [dims]))


# ---- Along a dim that stays as long as it is


@row("cumsum")
def _cumsum(call: Call) -> Form:
    linear = "self" if sums(call.self.dtype, call.results[0].dtype) else ""
    return Form("... dim:_ -> ... dim:_", linear=linear)


row("cumprod logcumsumexp cummax cummin", "... dim:_ -> ... dim:_ *")


# ---- logsumexp


def _logsumexp(self: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    x = wide(self) if self.is_floating_point() else cast(self, torch.get_default_dtype())
    dims = list(dim) or list(range(x.dim()))
    largest = x.amax(dims, keepdim=True)
    largest = largest.masked_fill(largest.abs() == inf, 0.0)
    total = (x - largest).exp_().sum(dims, keepdim=True).log() + largest
    if not keepdim:
        total = total.view([n for n, gone in zip(x.shape, _reduced(x, dims), strict=True) if not gone])
    return cast(total, self.dtype if self.is_floating_point() else x.dtype)


row("logsumexp", _REDUCED, whole="r", instead=_logsumexp)


# ---- Counts


@row("histc", values=True)
def _histc(call: Call) -> str | None:
    """Without bounds it takes the smallest and largest element, which no rank knows."""
    return signature([names(call.self.dim())], [["_"]]) if call.min != call.max else None
