"""Batch norm over the whole batch, as on one card: where the batch is cut, sums travel and running statistics stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._share import cast, wide

aten = torch.ops.aten
Three = tuple[Tensor | None, Tensor | None, Tensor | None]


# ---- Forward


def _forward_form(call: Call, training: bool) -> Form:
    """In training the kernels also write running statistics, which they must see whole if anything is cut."""
    if not training:
        # What the kernels do; their meta functions say otherwise (torch 2.13).
        call.results[1:] = [t.new_empty([0]) for t in call.results[1:]]
    running = call.values.get("running_mean") is not None
    whole = ("n c ..." if running else "n ...") if training else ""
    stats = ["c" if t.shape[0] == dims_c(call) else "_" for t in call.results[1:]]
    return Form(f"n c ..., c* -> {', '.join(['n c ...', *stats])}", whole=whole, nonempty="c")


def _by_training(call: Call) -> Form:
    return _forward_form(call, call.training)


def dims_c(call: Call) -> int:
    """Channels of the input."""
    return call.input.shape[1]


def _no_stats(c: Local) -> None:
    """In evaluation nothing is saved for the backward operator."""
    func, dtypes = c.call.func, [t.dtype for t in c.call.results[1:]]
    if any(t.numel() for t in c.call.results[1:3]):
        return

    def run(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return func(x, *args, **kwargs)[0], *(x.new_empty([0], dtype=dtype) for dtype in dtypes)

    c.run = run


def _forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two small sums for the statistics, then the kernel that normalizes with given ones."""
    x = wide(input)
    dims = [0, *range(2, x.dim())]
    size = input.numel() // max(input.shape[1], 1)
    mean = x.mean(dims)
    centred = x - mean.reshape(_across(x))
    var = centred.mul_(centred).mean(dims)
    if running_mean is not None and running_var is not None:
        _average(running_mean, mean, momentum)
        _average(running_var, var * (size / max(size - 1, 1)), momentum)
    like = x.dtype if weight is None else weight.dtype
    out = aten.native_batch_norm(input, weight, bias, cast(mean, like), cast(var, like), False, momentum, eps)[0]
    return out, mean, (var + eps).rsqrt_()


def _average(running: Tensor, new: Tensor, momentum: float) -> None:
    # One write, of the batch: a step in microbatches tells of writes that are the same for each.
    running.copy_((running * (1 - momentum)).add_(cast(new, running.dtype), alpha=momentum))


def _across(x: Tensor) -> list[int]:
    """The shape in which a number for each channel broadcasts."""
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def _reserve(input: Tensor) -> Tensor:
    """What a fused kernel would keep for its backward operator: nothing, as that runs as other operators too."""
    return input.new_empty([0], dtype=torch.uint8)


row("native_batch_norm _native_batch_norm_legit miopen_batch_norm", local=_no_stats, positions="", instead=_forward)(
    _by_training
)


def _without_running(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(input, weight, bias, None, None, training, momentum, eps)


row("_native_batch_norm_legit.no_stats", instead=_without_running)(lambda call: _forward_form(call, True))


def _cudnn(*args: Any) -> tuple[Tensor, ...]:
    return *_forward(*args), _reserve(args[0])


row("cudnn_batch_norm", local=_no_stats, positions="", instead=_cudnn)(_by_training)


def _with_update(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return *_forward(input, weight, bias, mean, var, True, momentum, eps), _reserve(input)


row("_batch_norm_with_update", instead=_with_update)(lambda call: _forward_form(call, True))
row("_batch_norm_no_update", local=_no_stats, positions="")(lambda call: _forward_form(call, False))


# ---- Backward


def _backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Three:
    grad, x = wide(grad_out), wide(input)
    dims, across = [0, *range(2, x.dim())], _across(x)
    invstd = save_invstd.reshape(across)
    hat = (x - save_mean.reshape(across)) * invstd
    by_weight, by_bias = (grad * hat).sum(dims), grad.sum(dims)
    by_input = None
    if output_mask[0]:
        size = input.numel() // max(input.shape[1], 1)
        by_input = grad - hat.mul_(by_weight.reshape(across) / size) - by_bias.reshape(across) / size
        by_input = by_input.mul_(invstd if weight is None else invstd * weight.reshape(across))
        by_input = cast(by_input, input.dtype)
    like = input.dtype if weight is None else weight.dtype
    return by_input, cast(by_weight, like) if output_mask[1] else None, cast(by_bias, like) if output_mask[2] else None


def _backward_form(call: Call, train: bool, mask: Sequence[bool]) -> Form:
    """The kernels end the process (a division by zero) where there are no channels or no elements."""
    x = "n c ..."
    known = {"grad_out": x, "grad_output": x, "input": x, "reserve": "_", "reserveSpace": "_"}
    operands = [
        known.get(name) or ("c" if t.shape[0] == dims_c(call) else "_")
        for name, t in zip(call.names, call.operands, strict=True)
    ]
    if len(call.results) == 3:  # the meta function gives all of them whatever is asked for
        call.results[:] = [t for t, wanted in zip(call.results, mask, strict=True) if wanted]
    linear = "grad_out" if "grad_out" in call.names else "grad_output"
    return Form(f"{', '.join(operands)} -> {x}, c, c", whole="n ..." if train else "", linear=linear, nonempty=x)


row("native_batch_norm_backward", instead=_backward)(lambda call: _backward_form(call, call.train, call.output_mask))


def _backward_reserve(*args: Any) -> Three:
    return _backward(*args[:10])


row("batch_norm_backward", instead=_backward_reserve)(lambda call: _backward_form(call, call.update, call.output_mask))


def _cudnn_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_var: Tensor,
    epsilon: float,
    *_: Tensor,
) -> Three:
    return _backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, (True,) * 3
    )


row("cudnn_batch_norm_backward miopen_batch_norm_backward", instead=_cudnn_backward)(
    lambda call: _backward_form(call, True, (True,) * 3)
)
