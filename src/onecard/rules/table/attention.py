"""Scaled dot-product attention: every kernel that torch chooses from.

Batch and heads may be cut, and on CPU, without a causal mask, the queries. Keys and values are whole.
With grouped queries each key head serves ``g`` query heads side by side: queries have ``(h g)`` heads, keys ``h``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import term

KEY = ["b", "h", "_", "_"]
GROUPED = "(h g)"

# How an operand, or a result of the backward operators, lies: as the queries, as the keys, or as the mask.
_AS_KEY = ("key", "value")
_AS_MASK = ("attn_mask", "attn_bias")
_AS_QUERY = ("query", "grad_out", "grad_out_", "out", "logsumexp")


def _heads(call: Call) -> list[str] | None:
    """The queries' dims; None if the shapes are not those of (grouped) attention heads."""
    q, k, v = call.query, call.key, call.value
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[1] != v.shape[1]:
        return None
    # A causal mask counts queries from the first; the GPU kernels' log-sum-exp has another length.
    time = "t" if "_for_cpu" in call.schema.name and not call.is_causal else "_"
    if q.shape[1] == k.shape[1]:
        return ["b", "h", time, "_"]
    return ["b", GROUPED, time, "_"] if k.shape[1] and q.shape[1] % k.shape[1] == 0 else None


def _sizes(call: Call, query: list[str]) -> dict[str, int]:
    heads = call.key.shape[1]
    return {"h": heads, "g": call.query.shape[1] // heads} if GROUPED in query else {}


def _fit(dims: list[str], tensor: Tensor) -> list[str]:
    """The dims of a tensor that broadcasts to these, or that stops before the last ones (logsumexp)."""
    return [name if size != 1 else "_" for name, size in zip(dims, tensor.shape, strict=False)]


def _operand(name: str, tensor: Tensor, query: list[str]) -> str:
    if name in _AS_KEY:
        return term(_fit(KEY, tensor))
    if name in _AS_MASK:
        return term(_fit(query[4 - tensor.dim() :], tensor))
    # Seeds, offsets and cumulative lengths of ragged batches.
    return term(_fit(query, tensor) if name in _AS_QUERY else ["_"] * tensor.dim())


def _forward(call: Call) -> Form | None:
    """With dropout there is no rule: see tensor/random_operators/attention.py."""
    query = _heads(call)
    if query is None or call.dropout_p:
        return None
    operands = [_operand(name, t, query) for name, t in zip(call.names, call.operands, strict=True)]
    # With dropout, written out, there is no log-sum-exp.
    results = [term(_fit(query, t) if i < 2 and t.dim() > 1 else ["_"] * t.dim()) for i, t in enumerate(call.results)]
    return Form(f"{', '.join(operands)} -> {', '.join(results)}", nonempty="b h g t", sizes=_sizes(call, query))


def _backward(call: Call) -> Form | None:
    query = _heads(call)
    if query is None or call.dropout_p:
        return None
    operands = [_operand(name, t, query) for name, t in zip(call.names, call.operands, strict=True)]
    alike = ("query", "key", "value", "attn_bias")
    results = [_operand(name, t, query) for name, t in zip(alike, call.results, strict=False)]
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return Form(text, linear=call.names[0], nonempty="b h g t", sizes=_sizes(call, query))


def _rows_dense(x: Any) -> Any:
    """The kernels read rows of the last dim as if they were dense; a gradient that comes from a sum is not."""
    return x.contiguous() if isinstance(x, Tensor) and x.dim() > 1 and x.stride(-1) != 1 and x.shape[-1] != 1 else x


def _rows_aligned(x: Any) -> Any:
    """Rows of a mask begin where the GPU kernels read 16 bytes at once, as in the mask that torch's own call makes for them."""
    x = _rows_dense(x)
    if not isinstance(x, Tensor) or x.dim() < 2 or all(n == 1 or not s % _ALIGNED for n, s in _leading(x)):
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _ALIGNED))[..., : x.shape[-1]]


_ALIGNED = 8  # elements: 16 bytes of the narrowest dtype of a mask


def _leading(x: Tensor) -> list[tuple[int, int]]:
    return list(zip(x.shape[:-1], x.stride()[:-1], strict=True))


def _local(c: Local) -> None:
    func, present = c.call.func, _present(c.call)
    shapes = [c.result_shape(i) for i in range(len(c.call.results))]
    bias = next((i for i, a in enumerate(func._schema.arguments) if a.name == "attn_bias"), None)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = [_rows_aligned(x) if i == bias else _rows_dense(x) for i, x in enumerate(args)]
        results = func(*given, **{name: _rows_dense(value) for name, value in kwargs.items()})
        return _as_promised(results, present, shapes, args[0])

    c.run = run


def _present(call: Call) -> list[bool]:
    """Which results are tensors, as the meta function has it."""
    return [isinstance(r, Tensor) for r in call.func(**call.values)]


def _as_promised(results: Any, present: list[bool], shapes: list[tuple[int, ...]], like: Tensor) -> tuple[Any, ...]:
    """A kernel may leave a result out that the meta function gives (a debug mask), or the reverse."""
    left = iter(shapes)
    made = []
    for result, promised in zip(results, present, strict=True):
        shape = next(left) if promised else None
        if isinstance(result, Tensor) != promised and not isinstance(result, int):
            result = like.new_empty(shape) if shape is not None else None
        made.append(result)
    return tuple(made)


def _cpu_results(call: Call) -> list[Tensor]:
    """Up to torch 2.11 the meta function says that the log-sum-exp is float32 whatever the query is."""
    out, logsumexp = call.meta_results()
    return [out, logsumexp.to(torch.float64)] if call.query.dtype == torch.float64 else [out, logsumexp]


def _macs(call: Call) -> int:
    """Two products forward, the weights and what they weigh; five backward: the weights once more, and four gradients."""
    q, k, v = call.query.shape, call.key.shape, call.value.shape
    back = "backward" in call.schema.name
    return int(prod(q[:-1]) * k[-2] * ((3 * q[-1] + 2 * v[-1]) if back else (q[-1] + v[-1])))


row(
    """_scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable""",
    local=_local,
    positions="",
    values=True,
    macs=_macs,
)(_forward)
row(
    "_scaled_dot_product_flash_attention_for_cpu",
    local=_local,
    positions="",
    values=True,
    results=_cpu_results,
    macs=_macs,
)(_forward)

row(
    """_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward""",
    local=_local,
    positions="",
    values=True,
    macs=_macs,
)(_backward)
