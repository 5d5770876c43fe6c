"""Transformer: the sizes of a decoder, as other libraries' configurations give them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a decoder-only transformer.

    Attributes:
        layers, hidden, heads: blocks, features, query heads; kv_heads: key heads, as many as queries if 0; head_dim: hidden /
            heads if 0.
        ffn: hidden units of the MLP, 4 * hidden if 0; gated: three matrices (SwiGLU) instead of two.
        vocab: rows of the embedding, padded as they lie in memory; tied: whether the head is the same matrix.
        sequence: tokens of a sequence.
        norm: "layer" or "rms"; positions: "learned", "rotary" or "none"; bias: whether linear layers have one.
        dropout: of attention weights and of what is added to the residual stream.
        attention: "flash" (one kernel that keeps no scores) or "scores" (products, softmax and dropout one by one).
        experts, top_k, expert_ffn, shared_ffn: of a mixture of experts; 0 if there is none.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = False
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rotary", "none"] = "learned"
    bias: bool = True
    dropout: float = 0.0
    attention: Literal["flash", "scores"] = "flash"
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
