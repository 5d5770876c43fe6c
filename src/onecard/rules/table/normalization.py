"""Layer, group and RMS norm: the normalized dims stay whole; where they are cut, only means and variances travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names
from onecard.rules.table._share import cast, wide

aten = torch.ops.aten
Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _stats_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """In which the kernels return means: on CUDA never in 16 bits, on a CPU as the weight."""
    if x.device.type != "cpu":
        return wide(x).dtype
    return x.dtype if weight is None else weight.dtype


def _normalized(call: Call) -> tuple[str, str]:
    """The normalized dims, which are the last ones, and what is left of them in the statistics."""
    inner = names(len(call.normalized_shape), "i")
    return " ".join(inner), " ".join("_" for _ in inner)


# ---- Layer norm


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(normalized_shape), 0))
    x = wide(input)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt_()
    out = centred.mul_(rstd)
    out = out if weight is None else out.mul_(weight)
    out = out if bias is None else out.add_(bias)
    stats = _stats_dtype(input, weight)
    return cast(out, input.dtype), cast(mean, stats), cast(rstd, stats)


@row("native_layer_norm", instead=_layer_norm)
def _layer_norm_rule(call: Call) -> Form:
    inner, one = _normalized(call)
    linear = "weight + bias" if call.weight is not None else ""
    text = f"... {inner}, {inner}, {inner} -> ... {inner}, ... {one} @0, ... {one} @0"
    return Form(text, whole=inner, linear=linear)


def _input_gradient(grad: Tensor, hat: Tensor, rstd: Tensor, dims: list[int], centred: bool) -> Tensor:
    """Gradient of a normalization by its input, from that by its normalized value ``hat``."""
    result = grad - hat * (grad * hat).mean(dims, keepdim=True)
    if centred:
        result = result - grad.mean(dims, keepdim=True)
    return result * rstd


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Three:
    inner = len(normalized_shape)
    dims, outer = list(range(-inner, 0)), list(range(input.dim() - inner))
    grad, hat = wide(grad_out), (wide(input) - mean) * rstd
    by_hat = grad if weight is None else grad * weight
    by_input = cast(_input_gradient(by_hat, hat, rstd, dims, True), input.dtype) if output_mask[0] else None
    by_weight = cast(_sum(grad * hat, outer), weight.dtype) if output_mask[1] and weight is not None else None
    by_bias = cast(_sum(grad, outer), bias.dtype) if output_mask[2] and bias is not None else None
    return by_input, by_weight, by_bias


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over some dims, where no dims mean none."""
    return x.sum(dims) if dims else x


def _contiguous(c: Local) -> None:
    """The CPU kernel is wrong for a shard that is not contiguous (torch 2.13)."""
    func = c.call.func

    def run(grad: Tensor, x: Tensor, *rest: Any, **named: Any) -> Any:
        return func(grad.contiguous(), x.contiguous(), *rest, **named)

    c.run = run


@row("native_layer_norm_backward", local=_contiguous, positions="", instead=_layer_norm_backward)
def _layer_norm_backward_rule(call: Call) -> Form:
    inner, one = _normalized(call)
    operands = f"... {inner}, ... {inner}, ... {one}, ... {one}, {inner}, {inner}"
    return Form(f"{operands} -> ... {inner}, {inner} @0 1 2 3, {inner} @0", whole=inner, linear="grad_out * weight")


# ---- RMS norm (CUDA has it as one operator; on a CPU it decomposes by itself)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(-len(normalized_shape), 0))
    x = wide(input)
    rstd = ((x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt_()
    out = x * rstd
    return cast(out if weight is None else out.mul_(weight), input.dtype), rstd


@row("_fused_rms_norm", instead=_rms_norm)
def _rms_norm_rule(call: Call) -> Form:
    inner, one = _normalized(call)
    return Form(f"... {inner}, {inner} -> ... {inner}, ... {one} @0", whole=inner, linear="weight")


def _rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    inner = len(normalized_shape)
    dims, outer = list(range(-inner, 0)), list(range(input.dim() - inner))
    grad, hat = wide(grad_out), wide(input) * rstd
    by_hat = grad if weight is None else grad * weight
    by_input = cast(_input_gradient(by_hat, hat, rstd, dims, False), input.dtype) if output_mask[0] else None
    by_weight = cast(_sum(grad * hat, outer), weight.dtype) if output_mask[1] and weight is not None else None
    return by_input, by_weight


@row("_fused_rms_norm_backward", local=_contiguous, positions="", instead=_rms_norm_backward)
def _rms_norm_backward_rule(call: Call) -> Form:
    inner, one = _normalized(call)
    text = f"... {inner}, ... {inner}, ... {one}, {inner} -> ... {inner}, {inner} @0 1 2"
    return Form(text, whole=inner, linear="grad_out * weight")


# ---- Group norm: samples and whole groups may be cut, so a cut of the channels is one of the groups where it divides them


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[N, C, *] as [N, groups, channels in a group, *]."""
    n, channels, *space = x.shape
    return x.reshape([n, groups, channels // groups, *space])


def _channels(weight: Tensor, groups: int, ndim: int) -> Tensor:
    return weight.reshape([1, groups, weight.shape[0] // groups, *[1] * (ndim - 3)])


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = _grouped(wide(input), group)
    dims = list(range(2, x.dim()))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt_()
    out = centred.mul_(rstd)
    out = out if weight is None else out.mul_(_channels(weight, group, x.dim()))
    out = out if bias is None else out.add_(_channels(bias, group, x.dim()))
    stats = [cast(t.reshape([N, group]), _stats_dtype(input, weight)) for t in (mean, rstd)]
    return cast(out.reshape(input.shape), input.dtype), stats[0], stats[1]


def _group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Three:
    grad, x = _grouped(wide(grad_out), group), _grouped(wide(input), group)
    inner = list(range(2, x.dim()))
    each = [N, group, *[1] * len(inner)]
    scale = rstd.reshape(each)
    hat = (x - mean.reshape(each)) * scale
    by_hat = grad if weight is None else grad * _channels(weight, group, x.dim())
    by_input = _input_gradient(by_hat, hat, scale, inner, True).reshape(input.shape) if output_mask[0] else None
    by_weight = (grad * hat).sum([0, *inner[1:]]).reshape([C]) if output_mask[1] else None
    by_bias = grad.sum([0, *inner[1:]]).reshape([C]) if output_mask[2] else None
    like = input.dtype if weight is None else weight.dtype
    return (
        None if by_input is None else cast(by_input, input.dtype),
        None if by_weight is None else cast(by_weight, like),
        None if by_bias is None else cast(by_bias, like),
    )


def _group_form(call: Call, text: str, linear: str) -> Form:
    sizes = {"g": call.group, "c": call.C // call.group}
    return Form(text, whole="c ...", nonempty="n g", sizes=sizes, linear=linear)


def _group_sizes(c: Local) -> None:
    c.set("N", c.length("n") if c.cut("n") else c.call.N)
    if c.cut("g"):
        groups = c.length("g")
        c.set("group", groups)
        c.set("C", c.call.C // c.call.group * groups)


def _group_backward_sizes(c: Local) -> None:
    _group_sizes(c)
    _contiguous(c)


@row("native_group_norm", local=_group_sizes, positions="", instead=_group_norm)
def _group_norm_rule(call: Call) -> Form:
    text = "n (g c) ..., (g c), (g c) -> n (g c) ..., n g @0, n g @0"
    return _group_form(call, text, "weight + bias" if call.weight is not None else "")


@row("native_group_norm_backward", local=_group_backward_sizes, positions="", instead=_group_norm_backward)
def _group_norm_backward_rule(call: Call) -> Form:
    text = "n (g c) ..., n (g c) ..., n g, n g, (g c) -> n (g c) ..., (g c) @0 1 2 3, (g c) @0"
    return _group_form(call, text, "grad_out * weight")
