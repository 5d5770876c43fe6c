"""Scaled dot-product attention with dropout on its weights, where torch would take a fused kernel.

Fused kernels draw numbers of their own, by thread. Here attention is written out (as torch's "math" backend does), and the
weights are dropped by onecard's generator; heads and batch stay cut. It costs the memory of the weights,
(batch, heads, queries, keys) of which each rank holds its part.

On the CPU torch itself writes attention with dropout out, but folds batch and heads into one dim for its products, so that
cut heads would have to be gathered. Therefore that operator is intercepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard._torch.names import DispatchKeySet
from onecard.place.layout import Layout
from onecard.random import Key
from onecard.rules.call import arguments, schema_of
from onecard.tensor.dispatch.build import build
from onecard.tensor.dispatch.entries import Direct, program, whole
from onecard.tensor.dispatch.intercept import onward
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.random_operators.draw import key_for
from onecard.tensor.spec import Spec, contiguous_stride

aten = torch.ops.aten
NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


class _Call:
    """One call on this rank: which batches and heads it has, and their part of each operand. Sequences are whole."""

    def __init__(self, func: Any, given: dict[str, Any]) -> None:
        self.given, self.name = given, schema_of(func).name
        query = given["query"]
        lead = next(x for x in given.values() if isinstance(x, DistTensor))
        self.layout = Layout.make(lead.mesh, (*lead._spec.layout.in_one_piece().dims[:2], (), ()))
        self.device, self.here = lead._spec.device, lead._spec.here
        self.shape = (*query.shape[:3], given["key"].shape[2])  # of the weights
        self.scale = given["scale"] if given["scale"] is not None else query.shape[-1] ** -0.5
        self.p = given["dropout_p"]

    def part(self, name: str) -> Tensor:
        """This rank's part of an operand; key and value heads are repeated for grouped queries."""
        x = self.given[name]
        times = self.shape[1] // x.shape[1]
        return self._cut(name, x if times == 1 else x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2))

    def _cut(self, name: str, x: Tensor) -> Tensor:
        layout = self._fit(x.shape)
        if isinstance(x, DistTensor):
            return x._become(layout, self.name, name, "sequences must be whole", explicit=False)
        return x[layout.local_slices(x.shape)] if self.here else x

    def _fit(self, shape: torch.Size) -> Layout:
        """The layout of what broadcasts to the weights."""
        dims = self.layout.dims[4 - len(shape) :]
        return Layout.make(self.layout.mesh, tuple(() if n == 1 else axes for n, axes in zip(shape, dims, strict=True)))

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """softmax(query @ key^T * scale + bias), in float32 at least."""
        root = (
            abs(self.scale) ** 0.5 or 1.0
        )  # half of it on each side keeps half precision in range, and rounds as torch does
        scores = torch.matmul(query * (self.scale / root), key.transpose(-2, -1) * root)
        if self.given["is_causal"]:
            kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~kept, -torch.inf)
        bias = self.given.get("attn_bias")
        if bias is not None and bias.numel():
            scores = scores + self._cut("attn_bias", bias)
        return torch.softmax(scores, -1, dtype=torch.float64 if query.dtype is torch.float64 else torch.float32)

    def kept(self, weights: Tensor, bits: Key) -> Tensor:
        """What the weights are multiplied with: zero, or what makes up for the zeros."""
        law = random.law("bernoulli_", weights.dtype, 1 - self.p)
        kept = random.fill(torch.empty_like(weights), law, bits, self.shape, self.layout.local_offset(self.shape))
        return kept.div_(1 - self.p) if self.p < 1 else kept

    def wrap(self, local: Tensor | None, like: Tensor, layout: Layout | None = None) -> DistTensor:
        """A result of an operand's dtype; of its shape, too, but with all heads."""
        shape = like.shape if layout is not None else torch.Size((*self.shape[:2], *like.shape[2:]))
        return self._made(local, like, shape, layout)

    def wrap_output(self, local: Tensor | None) -> DistTensor:
        """The output: as many rows as there are queries, as wide as the values."""
        value = self.given["value"]
        return self._made(local, value, torch.Size((*self.shape[:3], value.shape[3])))

    def _made(self, local: Tensor | None, like: Tensor, shape: torch.Size, layout: Layout | None = None) -> DistTensor:
        spec = Spec.make(layout or self.layout, shape, contiguous_stride(shape), like.dtype, self.device)
        return wrap(
            torch.empty(0, dtype=like.dtype, device=self.device) if local is None else local.to(like.dtype), spec
        )

    def wrap_bias(self, inner: Tensor | None, bias: Tensor) -> DistTensor:
        """The gradient of the bias: the sum over what it was broadcast to, pending over the ranks that have parts of it."""
        lead = 4 - bias.dim()
        dims = [*range(lead), *(lead + d for d, n in enumerate(bias.shape) if n == 1 != self.shape[lead + d])]
        pending = tuple(sorted((axis, "sum") for d in dims for axis in self.layout.dims[d]))
        layout = Layout.make(self.layout.mesh, self._fit(bias.shape).dims, pending)
        if inner is not None:
            inner = (inner.sum(dims, keepdim=True) if dims else inner).reshape(layout.local_shape(bias.shape))
        return self.wrap(inner, bias, layout)


def _forward(func: Any, args: Any, kwargs: Any) -> Any:
    call = _Call(func, arguments(func, args, kwargs))
    bits = key_for(func, call.given["query"], None, call.shape)
    query, key, value = map(call.part, ("query", "key", "value"))
    local = None
    if call.here:
        weights = call.weights(query, key)
        local = torch.matmul((weights * call.kept(weights, bits)).to(value.dtype), value)
    output = call.wrap_output(local)
    seed = bits.pack()  # for the backward operator, in the place of the kernel's own seed
    made = {"output": output, "rng_state": seed, "philox_seed": seed, "max_q": call.shape[2], "max_k": call.shape[3]}
    # Torch's own formula hands these on to the backward operator.
    return tuple(made.get(r.name, torch.empty(0, device="cpu")) for r in func._schema.returns)


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    """d output -> d query, key, value (and the bias), with the weights computed and dropped again."""
    given = arguments(func, args, kwargs)
    call = _Call(func, given)
    operands = [
        call.part(name) for name in ("query", "key", "value", "grad_out" if "grad_out" in given else "grad_out_")
    ]
    grads: list[Tensor | None] = [None] * 4
    if call.here:
        grads = _gradients(call, *operands)
    results: list[Tensor] = [
        call.wrap(g, given[name]) for g, name in zip(grads, ("query", "key", "value"), strict=False)
    ]
    results[1:] = [_ungroup(g, given["key"].shape[1]) for g in results[1:]]
    if len(func._schema.returns) == 4:
        bias = given["attn_bias"]
        wanted = given["grad_input_mask"][3] and bias is not None
        results.append(call.wrap_bias(grads[3], bias) if wanted else torch.empty(0, device="cpu"))
    return tuple(results)


def _gradients(call: _Call, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor | None]:
    weights = call.weights(query, key)
    kept = call.kept(weights, Key.unpack(call.given["philox_seed"]))
    of_value = torch.matmul((weights * kept).to(grad.dtype).transpose(-2, -1), grad)
    of_weights = torch.matmul(grad, value.transpose(-2, -1)) * kept
    inner = aten._softmax_backward_data(of_weights.to(weights.dtype), weights, -1, weights.dtype)
    scaled = (inner * call.scale).to(query.dtype)
    return [torch.matmul(scaled, key), torch.matmul(scaled.transpose(-2, -1), query), of_value, inner]


def _ungroup(grad: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were repeated."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _dropping(handler: Any) -> Any:
    """With dropout the handler, without it the row of the table."""

    def decide(func: Any, args: Any, kwargs: Any) -> Any:
        return Direct(func, handler) if arguments(func, args, kwargs)["dropout_p"] else build(func, args, kwargs)

    return decide


_MATH = aten._scaled_dot_product_attention_math.default


@whole(_MATH)
def _written_out(
    keyset: DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not dropout_p or dropout_mask is not None or not isinstance(query, DistTensor) or query.dim() != 4:
        rest = {"scale": scale, "enable_gqa": enable_gqa}
        return onward(_MATH, keyset, query, key, value, attn_mask, dropout_p, is_causal, dropout_mask, **rest)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    fused = aten._scaled_dot_product_fused_attention_overrideable
    output = fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return output, torch.empty(0, dtype=query.dtype, device=query._spec.device)


for _name in NAMES:
    program(getattr(aten, _name).default)(_dropping(_forward))
    program(getattr(aten, _name + "_backward").default)(_dropping(_backward))
