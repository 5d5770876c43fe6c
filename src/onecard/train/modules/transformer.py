"""nn.MultiheadAttention and nn.TransformerEncoder when they evaluate: torch's operators for that, in parts that have rules.

Without gradients these modules take a "fast path": one operator for all of attention, one for a whole encoder layer, and a
nested tensor where a batch has padding. The results are those of the operators used in training, except that an encoder
gives zeros (before its last norm) at positions that are padding. Here they are made of the operators used in training; in
the place of a nested tensor goes the padded one, which knows its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from onecard._torch import names as _torch
from onecard._torch.names import DispatchKey, DispatchKeySet
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.dispatch.entries import whole
from onecard.tensor.dispatch.intercept import onward

aten = torch.ops.aten

# What nn.MultiheadAttention.merge_masks calls a mask of (batch, keys). Others broadcast to (batch, heads, queries, keys).
_PADDING = 1


def _attention(
    keyset: DispatchKeySet, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
    qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Operands are (batch, sequence, width)."""
    if query is key and key is value:
        projected: Sequence[Tensor] = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        three = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        projected = [F.linear(x, weight, bias) for x, weight, bias in three]
    q, k, v = (x.unflatten(-1, (num_head, -1)).transpose(1, 2) for x in projected)
    weights = None
    if mask is None and not need_weights:
        heads = F.scaled_dot_product_attention(q, k, v)
    else:  # written out also where only a mask is given: no key at all is NaN, as in torch's operator; fused it is zero
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            left_out = mask.to(torch.bool)
            scores = scores.masked_fill(left_out[:, None, None] if mask_type == _PADDING else left_out, -torch.inf)
        weights = scores.softmax(-1)
        heads = weights @ v
    output = F.linear(heads.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if weights is None or not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _encoder_layer(
    keyset: DispatchKeySet, src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor,
    norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor,
    ffn_weight_2: Tensor, ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    x, padding = _padded(src)
    if padding is not None:
        mask, mask_type = padding, _PADDING

    def attend(x: Tensor) -> Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attention(keyset, x, x, x, embed_dim, num_heads, *projections, mask, False, False, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attend(norm_1(x))
        x = x + feed_forward(norm_2(x))
    else:
        x = norm_1(x + attend(x))
        x = norm_2(x + feed_forward(x))
    return x if padding is None else _with_padding(x, padding)


def _padded(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tensor and which of its positions (batch, sequence) are padding; None: unknown."""
    if not x.is_nested:
        return x, getattr(x, "_padding", None)
    whole = x.to_padded_tensor(0.0)
    lengths = x._nested_tensor_size()[:, :1].to(whole.device)
    return whole, torch.arange(whole.shape[1], device=whole.device) >= lengths


def _with_padding(x: Any, padding: Tensor) -> Tensor:
    x._padding = padding
    return x


def _from_mask(keyset: DispatchKeySet, t: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
    """In the place of a nested tensor; ``mask`` says what is no padding."""
    if not isinstance(t, DistTensor) and isinstance(mask, DistTensor):
        t = shard_tensor(t, mask.mesh, [Replicate()] * mask.mesh.ndim)
    return _with_padding(t.view_as(t), ~mask)


def _left_aligned(keyset: DispatchKeySet, t: Tensor, mask: Tensor) -> bool:
    return bool(_is_left_aligned(mask))


def _is_left_aligned(mask: Tensor) -> Tensor:
    lengths = mask.sum(1, keepdim=True)
    return (mask == (torch.arange(mask.shape[1], device=mask.device) < lengths)).all()


def _to_padded(keyset: DispatchKeySet, x: Tensor, padding: float, output_size: Any = None) -> Tensor:
    where = getattr(x, "_padding", None)
    if where is None:
        return onward(aten.to_padded_tensor.default, keyset, x, padding, output_size)
    return _filled(x, where, padding, output_size)


def _filled(x: Tensor, where: Tensor, padding: float, output_size: Any) -> Tensor:
    x = x.masked_fill(where[..., None], padding)
    missing = 0 if output_size is None else output_size[1] - x.shape[1]
    return F.pad(x, (0, 0, 0, missing), value=padding) if missing else x


# -- while a step is recorded ----------------------------------------------------------------------------------------------


@contextmanager
def recordable() -> Iterator[None]:
    """Inside, modules in evaluation take the fast path as ever, though a mode looks on, and without nested tensors.

    torch asks whether the padding is at the end of each row; an encoder that has some elsewhere gives no zeros there. A recording
    holds both cases: zeros where padding is, if all of it is at the end.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.overrides, "has_torch_function", _overrides))
        for owner, name, made in (
            (torch, "_nested_tensor_from_mask_left_aligned", lambda was: lambda t, mask: True),
            (torch, "_nested_tensor_from_mask", lambda was: _padded_from_mask),
            (torch, "_transformer_encoder_layer_fwd", _layer_of_padded),
            (Tensor, "to_padded_tensor", _padded_again),
        ):
            stack.enter_context(patch.object(owner, name, made(getattr(owner, name))))
        yield


def _overrides(values: Any) -> bool:
    """``torch.overrides.has_torch_function`` but for modes."""
    found = (getattr(type(x), "__torch_function__", _torch.disabled_torch_function) for x in values)
    return any(getattr(f, "__func__", f) not in (_torch.disabled_torch_function, _PLAIN) for f in found)


def _padded_from_mask(t: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
    made: Any = _from_mask(_NO_KEYS, t, mask, mask_check)
    made._ends = made._padding & _is_left_aligned(mask)
    return made


def _layer_of_padded(was: Callable[..., Any]) -> Callable[..., Any]:
    def run(src: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(src, "_ends", None) is None:
            return was(src, *args, **kwargs)
        made: Any = _encoder_layer(_NO_KEYS, src, *args, **kwargs)
        made._ends = src._ends
        return made

    return run


def _padded_again(was: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, padding: float, output_size: Any = None) -> Any:
        where = getattr(x, "_ends", None)
        return was(x, padding, output_size) if where is None else _filled(x, where, padding, output_size)

    return run


_PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_NO_KEYS = DispatchKeySet(DispatchKey.CPU)  # nothing goes on from here
whole(aten._native_multi_head_attention.default)(_attention)
whole(aten._transformer_encoder_layer_fwd.default)(_encoder_layer)
whole(aten._nested_tensor_from_mask.default)(_from_mask)
whole(aten._nested_tensor_from_mask_left_aligned.default)(_left_aligned)
whole(aten.to_padded_tensor.default)(_to_padded)
