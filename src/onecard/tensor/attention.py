"""Scaled dot-product attention with dropout on its weights, where torch would take a fused kernel.

Fused kernels draw numbers of their own, by thread. Here attention is written out (as torch's "math" backend does), and the
weights are dropped by onecard's generator; heads and batch stay cut. It costs the memory of the weights,
(batch, heads, queries, keys) of which each rank holds its part. On the CPU torch itself writes attention with dropout out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.random import Key
from onecard.tensor.build import build
from onecard.tensor.chance import arguments, fill, key_for
from onecard.tensor.dispatch import Direct, builders

aten = torch.ops.aten
NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def _weights(query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
    """softmax(query @ key^T * scale + bias), in float32 at least."""
    scores = torch.matmul(query, key.transpose(-2, -1)) * _scale(query, given)
    if given["is_causal"]:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~kept, -torch.inf)
    bias = given.get("attn_bias")
    if bias is not None and bias.numel():
        scores = scores + bias
    return torch.softmax(scores, -1, dtype=torch.float64 if query.dtype is torch.float64 else torch.float32)


def _scale(query: Tensor, given: dict[str, Any]) -> float:
    return given["scale"] if given["scale"] is not None else query.shape[-1] ** -0.5


def _kept(weights: Tensor, p: float, bits: Key) -> Tensor:
    """What the weights are multiplied with: zero, or what makes up for the zeros."""
    kept = torch.empty_like(weights)
    return fill(kept, random.law("bernoulli_", kept.dtype, 1 - p), bits).mul_(0.0 if p == 1 else 1 / (1 - p))


def _repeat(key: Tensor, heads: int) -> Tensor:
    """A key head for each query head."""
    times = heads // key.shape[1]
    return key if times == 1 else key.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _forward(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    query, p = given["query"], given["dropout_p"]
    key, value = (_repeat(given[name], query.shape[1]) for name in ("key", "value"))
    bits = key_for(func, query, None)
    weights = _weights(query, key, given)
    output = torch.matmul((weights * _kept(weights, p, bits)).to(value.dtype), value)
    seed = torch.tensor(bits)  # for the backward operator, in the place of the kernel's own seed
    made = {"output": output, "rng_state": seed, "philox_seed": seed, "max_q": query.shape[2], "max_k": key.shape[2]}
    return tuple(made.get(r.name, torch.empty(0)) for r in func._schema.returns)


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    """d output -> d query, key, value (and the bias), with the weights computed and dropped again."""
    given = arguments(func, args, kwargs)
    query, p = given["query"], given["dropout_p"]
    heads, pairs = query.shape[1], given["key"].shape[1]
    key, value = (_repeat(given[name], heads) for name in ("key", "value"))
    grad = given["grad_out"] if "grad_out" in given else given["grad_out_"]
    weights = _weights(query, key, given)
    kept = _kept(weights, p, Key(*given["philox_seed"].tolist()))
    grad_value = torch.matmul((weights * kept).to(grad.dtype).transpose(-2, -1), grad)
    grad_weights = torch.matmul(grad, value.transpose(-2, -1)) * kept
    inner = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    scaled = (inner * _scale(query, given)).to(query.dtype)
    grad_query = torch.matmul(scaled, key)
    grad_key = torch.matmul(scaled.transpose(-2, -1), query)
    results = [grad_query, *(_unrepeat(g, pairs) for g in (grad_key, grad_value))]
    if len(func._schema.returns) == 4:
        wanted = given["grad_input_mask"][3] and given["attn_bias"] is not None
        results.append(_sum_to(inner.to(query.dtype), given["attn_bias"].shape) if wanted else torch.empty(0))
    return tuple(results)


def _unrepeat(grad: Tensor, heads: int) -> Tensor:
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _sum_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of what was broadcast."""
    lead = grad.dim() - len(shape)
    dims = [*range(lead), *(lead + d for d, size in enumerate(shape) if size == 1 != grad.shape[lead + d])]
    return (grad.sum(dims, keepdim=True) if dims else grad).reshape(shape)


def _dropping(handler: Any) -> Any:
    """With dropout the handler, without it the row of the table."""

    def program(func: Any, args: Any, kwargs: Any) -> Any:
        return Direct(func, handler) if arguments(func, args, kwargs)["dropout_p"] else build(func, args, kwargs)

    return program


for _name in NAMES:
    builders[getattr(aten, _name).default] = _dropping(_forward)
    builders[getattr(aten, _name + "_backward").default] = _dropping(_backward)
