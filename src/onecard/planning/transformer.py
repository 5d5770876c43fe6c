"""Transformer: the sizes of a decoder, as other libraries' configurations give them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onecard.planning import json_text
from onecard.planning.hugging_face import sizes_of
from onecard.planning.wanted import Fields, by_field, spoken

VERSION = 1


@by_field
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
        rows: of learned positions; as many as the sequence has tokens if 0.
        qkv_bias: queries, keys and values have a bias where other layers have none; qk_norm: norms of queries and keys, by head.
        embedding_norm: a norm behind the embedding.
        kv_latent, q_latent, rope_dim: of latent attention, as DeepSeek has it; 0 if there is none. Keys and values come from
            ``kv_latent`` numbers of a token, queries from ``q_latent`` (0: from all of it); ``rope_dim`` features of a head turn,
            ``head_dim`` others do not, and as many are a value's.
        dense_layers: blocks at the beginning that have an MLP in the place of experts.

    Raises:
        PlanError: a field that cannot be, by its name.

    Example:
        >>> gpt2 = Transformer(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024, tied=True)
        >>> f"{gpt2.parameters:,}"
        '124,439,808'
        >>> Transformer(layers=12, hidden=768, heads=7, vocab=50257, sequence=1024)
        Traceback (most recent call last):
        onecard.errors.PlanError: Transformer: heads=7: hidden=768 is no multiple of it; give head_dim too if that is meant
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
    rows: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        want = Fields(self)
        want.whole("layers", "hidden", "heads", "vocab", "sequence")
        want.whole("kv_heads", "head_dim", "ffn", "experts", "top_k", "expert_ffn", "shared_ffn", "rows", least=0)
        want.whole("kv_latent", "q_latent", "rope_dim", "dense_layers", least=0)
        want.yes_or_no("gated", "tied", "bias", "qkv_bias", "qk_norm", "embedding_norm")
        want.one_of("norm", ("layer", "rms"))
        want.one_of("positions", ("learned", "rotary", "none"))
        want.one_of("attention", ("flash", "scores"))
        if type(self.dropout) not in (int, float):
            raise want.stop("dropout", f"want a number from 0 to 1, not a {spoken(self.dropout)}")
        if not 0 <= self.dropout < 1:
            raise want.stop("dropout", "want a number from 0 to 1")
        if not self.head_dim and self.hidden % self.heads:
            raise want.stop("heads", f"hidden={self.hidden} is no multiple of it; give head_dim too if that is meant")
        if self.heads % self.key_heads:
            raise want.stop(
                "kv_heads", f"heads={self.heads} is no multiple of it: each key head serves as many query heads"
            )
        if self.rows and self.positions == "learned" and self.rows < self.sequence:
            raise want.stop("rows", f"a sequence has {self.sequence} tokens, each of which needs a learned position")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise want.stop("top_k", f"each token goes to 1 to {self.experts} of the experts")
        if self.experts and not self.expert_ffn:
            raise want.stop("expert_ffn", "experts need their number of hidden units")
        if not self.experts and (self.top_k or self.expert_ffn or self.shared_ffn):
            name = next(name for name in ("top_k", "expert_ffn", "shared_ffn") if getattr(self, name))
            raise want.stop(name, "there are no experts; give experts too")
        if self.dense_layers and not (self.experts and self.dense_layers < self.layers):
            raise want.stop("dense_layers", "blocks before those with experts: fewer than layers, and give experts too")
        self._check_latent(want)

    def _check_latent(self, want: Fields) -> None:
        if not self.kv_latent:
            for name in ("q_latent", "rope_dim"):
                if getattr(self, name):
                    raise want.stop(name, "of latent attention; give kv_latent too")
            return
        if not self.rope_dim or self.rope_dim % 2:
            raise want.stop("rope_dim", "latent attention has an even number of features that turn, 2 or more")
        if self.attention != "flash" or self.positions != "rotary" or self.key_heads != self.heads:
            raise want.stop(
                "kv_latent",
                'latent attention wants attention="flash", positions="rotary", and as many key heads as heads',
            )

    @property
    def key_heads(self) -> int:
        """How many key heads there are."""
        return self.kv_heads or self.heads

    @property
    def per_head(self) -> int:
        """Features of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Hidden units of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def parameters(self) -> int:
        """How many there are, with biases, norms and positions; a tied head counts once."""
        embedding = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = (self.rows or self.sequence) * self.hidden if self.positions == "learned" else 0
        blocks = self.layers * self.block_parameters + self.dense_layers * (
            self._mlp(self.inner) - self._mlp_parameters
        )
        return embedding + positions + blocks + (1 + self.embedding_norm) * self._norm

    @property
    def block_parameters(self) -> int:
        """Of one block; of those with experts, where some have none."""
        queries, keys = self.heads * self.per_head, self.key_heads * self.per_head
        biases = (queries + 2 * keys) * (self.bias or self.qkv_bias) + self.hidden * self.bias
        norms = 2 * self._norm + (2 * self.per_head if self.qk_norm else 0) + self.q_latent + self.kv_latent
        return self._attention_matrices + biases + norms + self._mlp_parameters

    @property
    def expert_parameters(self) -> int:
        """Of all blocks' experts; what every token goes to is not among them."""
        return (self.layers - self.dense_layers) * self.experts * self._mlp(self.expert_ffn)

    @property
    def flops_per_token(self) -> int:
        """Operations of a training step for each token, forward and backward, a multiply-add being two; nothing computed again.

        All of the attention's scores count, also those that a causal mask hides.

        Source: Narayanan et al., arXiv 2104.04473, without its recomputation: 72 l h^2 (1 + s / 6 h + V / 12 l h) for GPT.

        Example:
            >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
            >>> f"{gpt3.flops_per_token:.4e}"
            '1.0764e+12'
        """
        scores = self.heads * (2 * self.per_head + self.rope_dim) * self.sequence
        matrices = (3 if self.gated else 2) * self.hidden
        mlp = matrices * self.inner
        mixture = matrices * (self.top_k * self.expert_ffn + self.shared_ffn) + self.hidden * self.experts
        dense = self.dense_layers if self.experts else self.layers
        blocks = self.layers * (self._attention_matrices + scores) + dense * mlp + (self.layers - dense) * mixture
        return 6 * (blocks + self.vocab * self.hidden)

    @property
    def _attention_matrices(self) -> int:
        if self.kv_latent:
            queries = (self.q_latent or self.hidden) * self.heads * (self.per_head + self.rope_dim)
            keys = self.kv_latent * self.heads * 2 * self.per_head
            down = self.hidden * (self.q_latent + self.kv_latent + self.rope_dim)
            return down + queries + keys + self.heads * self.per_head * self.hidden
        return 2 * self.hidden * (self.heads + self.key_heads) * self.per_head

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def _mlp_parameters(self) -> int:
        if not self.experts:
            return self._mlp(self.inner)
        shared = self._mlp(self.shared_ffn) if self.shared_ffn else 0
        return self.experts * self._mlp(self.expert_ffn) + shared + self.hidden * self.experts

    def _mlp(self, units: int) -> int:
        into = 2 if self.gated else 1
        return (into + 1) * self.hidden * units + (into * units + self.hidden) * self.bias

    @staticmethod
    def from_config(config: Mapping[str, Any], sequence: int = 0, where: str = "config") -> Transformer:
        """The sizes that a Hugging Face ``config.json`` says: of Llama, Mistral, Qwen2 and 3, GPT-2, GPT-NeoX, BLOOM, Mixtral,
        DeepSeek-V2 and V3.

        Args:
            config: what ``json.loads`` gives of it.
            sequence: tokens of a sequence; as many as the model has positions if 0.
            where: the file's name, for errors.

        Raises:
            PlanError: a model that is not known, a field that is missing or cannot be.

        Example:
            >>> Transformer.from_config({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
            ...                          "n_layer": 12, "n_head": 12}).parameters
            124439808
        """
        return Transformer(**sizes_of(json_text.Located(where, config, {}), sequence))

    def to_json(self) -> str:
        """As JSON with a version; ``Transformer.from_json`` reads it back."""
        return json_text.written(self, VERSION)

    @staticmethod
    def from_json(given: str | Path | Mapping[str, Any]) -> Transformer:
        """What ``to_json`` wrote: a text, the path of a file, or a dict.

        Raises:
            PlanError: with the line and the field that is wrong.
        """
        return json_text.read(Transformer, json_text.source(given, "Transformer"), VERSION)
