"""nn.MultiheadAttention in training, in shapes that keep time, batch and heads apart.

torch's own code merges time and batch before the output projection. Where the batch is cut, the parts of that merged dim
are no block of it, so they would be gathered, once a layer, and all that follows would run whole on every rank. Same
operators, masks and random numbers otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard import _torch
from onecard.tensor import DistTensor


class MultiheadAttention(nn.MultiheadAttention):
    """What ``shard_layer`` makes of a ``nn.MultiheadAttention``: the same parameters and results."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        given = (query, key, value)
        wrong = (is_causal and attn_mask is None) or not self._fit(*given, key_padding_mask, attn_mask)
        if wrong or not self._is_ours(given):  # what is wrong is torch's to tell
            options: Any = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(*given, *options)
        mask = self._mask(query, key_padding_mask, None if is_causal and not need_weights else attn_mask)
        if not self.batch_first:
            same = query is key and key is value
            given = (query.transpose(0, 1),) * 3 if same else tuple(x.transpose(0, 1) for x in given)  # type: ignore[assignment]
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._project(*given))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
        output = F.linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _is_ours(self, given: tuple[Tensor, ...]) -> bool:
        """Whether this call merges dims in torch's code; not in evaluation, see transformer.py."""
        plain = self.bias_k is None and self.bias_v is None and not self.add_zero_attn
        distributed = any(isinstance(x, DistTensor) for x in (*given, self.out_proj.weight))
        return distributed and plain and (self.training or torch.is_grad_enabled())

    def _fit(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None) -> bool:
        """Whether shapes are as torch wants them; products and sums would broadcast some that it refuses."""
        if not query.dim() == key.dim() == value.dim() == 3:
            return False
        (batch, time), (batch_of_key, keys) = (
            x.shape[:2] if self.batch_first else x.shape[1::-1] for x in (query, key)
        )
        masks = ((time, keys), (batch * self.num_heads, time, keys))
        return (
            batch == batch_of_key
            and key.shape[:2] == value.shape[:2]
            and (mask is None or tuple(mask.shape) in masks)
            and (padding is None or tuple(padding.shape) == (batch, keys))
        )

    def _mask(self, query: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one to add to the scores of (batch, heads, queries, keys)."""
        options: dict[str, Any] = {"target_type": query.dtype}
        mask_type = _torch.mask_dtype(mask)
        padding = _torch.canonical_mask(padding, "key_padding_mask", mask_type, "attn_mask", **options)
        mask = _torch.canonical_mask(mask, "attn_mask", None, "", check_other=False, **options)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        if padding is None:
            return mask
        padding = padding[:, None, None]
        return padding if mask is None else mask + padding

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        bias: Any = self.in_proj_bias
        if self._qkv_same_embed_dim and query is key and key is value:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        weights = (
            self.in_proj_weight.chunk(3)
            if self._qkv_same_embed_dim
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))


def keep_dims_apart(module: nn.Module) -> None:
    """Has a module of torch compute in shapes that keep its batch cut, if it is one that does not. In place."""
    if type(module) is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention
