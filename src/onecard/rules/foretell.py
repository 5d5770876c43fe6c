"""The results of common calls without torch's meta functions, which are written in Python and take most of a new shape's time.

Only what is plain is foretold: contiguous operands of one real dtype whose shapes fit. All else, mistakes above all, is left
to torch; tests compare both. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecard.rules.call import Call

_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_WIDE = {torch.float32, torch.float64}  # of others a device may keep means in another dtype
_PLAIN = (int, float, bool, str, type(None))
Shape = tuple[int, ...]


def foretell(call: Call) -> list[Tensor] | None:
    """The result tensors (meta) of a call, or None where torch has to say.

    Example:
        >>> x = torch.empty(2, 3, device="meta")
        >>> [t.shape for t in foretell(Call(torch.ops.aten.gelu.default, [x], {}))]
        [torch.Size([2, 3])]
        >>> foretell(Call(torch.ops.aten.gelu.default, [x.T], {})) is None
        True
    """
    schema = call.schema
    shapes_of = _RESULTS.get(f"{schema.name}.{schema.overload}" if schema.overload else schema.name)
    if shapes_of is None:
        return None
    dtype = call.operands[0].dtype
    if dtype not in _DTYPES or not all(_is_plain(t, dtype) for t in call.operands):
        return None
    shapes = shapes_of(call)
    return None if shapes is None else [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def _is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    return t.numel() > 0 and t.is_contiguous() and t.dtype in (dtype, torch.int64)


def _same(call: Call) -> Sequence[Shape] | None:
    """Element by element, of operands of one shape."""
    first = call.operands[0]
    alike = all(t.shape == first.shape and t.dtype is first.dtype for t in call.operands[1:])
    tensors = set(call.names)
    plain = all(type(v) in _PLAIN for name, v in call.values.items() if name not in tensors)
    return [tuple(first.shape)] if alike and plain else None


def _softmax(call: Call) -> Sequence[Shape] | None:
    return [tuple(call.self.shape)] if _inside(call.dim, call.self) and not call.half_to_float else None


def _softmax_backward(call: Call) -> Sequence[Shape] | None:
    grad, output = call.operands
    fits = grad.shape == output.shape and grad.dtype is output.dtype is call.input_dtype
    return [tuple(grad.shape)] if fits and _inside(call.dim, grad) else None


def _inside(dim: int, x: Tensor) -> bool:
    return -max(x.dim(), 1) <= dim < max(x.dim(), 1)


def _linear(call: Call) -> Sequence[Shape] | None:
    x, weight, *bias = call.operands
    fits = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and _one_dtype(call)
    if not fits or any(b.shape != weight.shape[:1] for b in bias):
        return None
    return [(*x.shape[:-1], weight.shape[0])]


def _layer_norm(call: Call) -> Sequence[Shape] | None:
    x, own = call.input, tuple(call.normalized_shape)
    fits = own and tuple(x.shape[-len(own) :]) == own and _one_dtype(call) and x.dtype in _WIDE
    if not fits or any(tuple(t.shape) != own for t in call.operands[1:]):
        return None
    rows = (*x.shape[: -len(own)], *(1,) * len(own))
    return [tuple(x.shape), rows, rows]


def _layer_norm_backward(call: Call) -> Sequence[Shape] | None:
    x, own = call.input, tuple(call.normalized_shape)
    if not own or tuple(x.shape[-len(own) :]) != own or call.grad_out.shape != x.shape:
        return None
    if x.dtype not in _WIDE or not _one_dtype(call):
        return None
    rows = (*x.shape[: -len(own)], *(1,) * len(own))
    pairs = [(call.mean, rows), (call.rstd, rows), (call.weight, own), (call.bias, own)]
    if any(t is not None and tuple(t.shape) != shape for t, shape in pairs):
        return None
    there = (True, call.weight is not None, call.bias is not None)
    wanted = [a and b for a, b in zip(call.output_mask, there, strict=True)]
    if wanted != list(call.output_mask):
        return None
    return [shape for shape, w in zip((tuple(x.shape), own, own), wanted, strict=True) if w]


def _nll(call: Call) -> Shape | None:
    """The shape of the loss; None if it is not the loss of a batch of rows."""
    x, target, weight = call.self, call.target, call.weight
    fits = x.dim() == 2 and tuple(target.shape) == (x.shape[0],) and target.dtype is torch.int64
    if not fits or (weight is not None and (tuple(weight.shape) != (x.shape[1],) or weight.dtype is not x.dtype)):
        return None
    return () if call.reduction else (x.shape[0],)


def _nll_forward(call: Call) -> Sequence[Shape] | None:
    loss = _nll(call)
    return None if loss is None else [loss, ()]


def _nll_backward(call: Call) -> Sequence[Shape] | None:
    loss = _nll(call)
    fits = loss is not None and tuple(call.grad_output.shape) == loss and not call.total_weight.dim()
    real = call.grad_output.dtype is call.total_weight.dtype is call.self.dtype
    return [tuple(call.self.shape)] if fits and real else None


def _one_dtype(call: Call) -> bool:
    return all(t.dtype is call.operands[0].dtype for t in call.operands)


_SAME = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar neg exp log sqrt rsqrt tanh sigmoid relu "
    "threshold_backward gelu gelu_backward silu silu_backward tanh_backward sigmoid_backward"
)
_RESULTS: dict[str, Callable[[Call], Sequence[Shape] | None]] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    "linear": _linear,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "nll_loss_forward": _nll_forward,
    "nll_loss_backward": _nll_backward,
}
