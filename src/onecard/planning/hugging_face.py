"""What a Hugging Face ``config.json`` says of a decoder's sizes, under each family's names. Pure.

Source: the configuration classes of transformers (``LlamaConfig`` and its kin), whose defaults count where a file says nothing.
"""

from __future__ import annotations

from typing import Any

from onecard.errors import PlanError
from onecard.planning.json_text import Located
from onecard.planning.wanted import spoken

_LLAMA = {"norm": "rms", "positions": "rotary", "bias": False, "gated": True}
_NEOX = {"norm": "layer", "positions": "rotary", "bias": True, "gated": False}
_GPT2 = {"norm": "layer", "positions": "learned", "bias": True, "gated": False}
_BLOOM = {"norm": "layer", "positions": "none", "bias": True, "gated": False, "embedding_norm": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA | {"qkv_bias": True},
    "qwen3": _LLAMA | {"qk_norm": True},
    "mixtral": _LLAMA,
    "qwen3_moe": _LLAMA | {"qk_norm": True},
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "bloom": _BLOOM,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
}
# A size, and under which names it may stand.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "seq_length"),
    "ffn": ("intermediate_size", "n_inner"),
}
_LATENT = ("deepseek_v2", "deepseek_v3")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "gpt2": {"tie": True},
    "bloom": {"tie": True},
}


def sizes_of(found: Located, sequence: int = 0) -> dict[str, Any]:
    """The arguments of ``Transformer``.

    Args:
        found: the configuration.
        sequence: tokens of a sequence; as many as the model has positions if 0.
    """
    config = _Config(found)
    family = config.family()
    sizes: dict[str, Any] = {name: config.size(name) for name in ("layers", "hidden", "heads", "vocab")}
    sizes |= FAMILIES[family]
    known = config.size("positions", 0)
    sizes["sequence"] = sequence or known
    if not sizes["sequence"]:
        raise PlanError(f"{found.where()}: does not say how long sequences are; give sequence=2048, or what yours have")
    if sizes["positions"] == "learned":
        if sequence > known:
            raise PlanError(
                f"{found.where(('n_positions',))}: has {known} positions, but sequences have {sequence} tokens"
            )
        sizes["rows"] = known
    sizes["ffn"] = config.size("ffn", 0)
    sizes |= _latent(config) if family in _LATENT else _heads(config, family)
    sizes["tied"] = config.flag("tie_word_embeddings", _DEFAULTS.get(family, {}).get("tie", False))
    if family == "llama" and config.flag("attention_bias", False) != config.flag("mlp_bias", False):
        raise PlanError(f"{found.where(('attention_bias',))}: biases of attention or MLP alone are not known here")
    if family == "llama":
        sizes["bias"] = config.flag("attention_bias", False)
    return sizes | _experts(config, family) | {"dropout": config.dropout()}


def _heads(config: _Config, family: str) -> dict[str, Any]:
    width = config.whole("head_dim", _DEFAULTS.get(family, {}).get("head_dim", 0))
    return {"kv_heads": config.whole("num_key_value_heads", 0), "head_dim": width}


def _latent(config: _Config) -> dict[str, Any]:
    """Of latent attention. Here values are as wide as what of a key does not turn."""
    nope, value = config.whole("qk_nope_head_dim", 128), config.whole("v_head_dim", 128)
    if nope != value:
        where = config.found.where(("v_head_dim",))
        raise PlanError(f"{where}: v_head_dim is {value}, qk_nope_head_dim {nope}; other than equal is not known here")
    return {
        "head_dim": nope, "rope_dim": config.whole("qk_rope_head_dim", 64), "kv_latent": config.whole("kv_lora_rank", 512),
        "q_latent": config.whole("q_lora_rank", 0),
    }  # fmt: skip


def _experts(config: _Config, family: str) -> dict[str, Any]:
    if family == "mixtral":
        sizes = {"experts": config.whole("num_local_experts", 8), "top_k": config.whole("num_experts_per_tok", 2)}
        return sizes | {"expert_ffn": config.size("ffn")}
    if family == "qwen3_moe":
        if config.whole("decoder_sparse_step", 1) != 1 or config.data.get("mlp_only_layers"):
            raise PlanError(f"{config.found.where(('decoder_sparse_step',))}: blocks without experts between those that have some"
                            " are not known here")  # fmt: skip
        sizes = {
            "experts": config.either("num_experts", "num_local_experts", 128),
            "top_k": config.whole("num_experts_per_tok", 8),
        }
        return sizes | {"expert_ffn": config.whole("moe_intermediate_size", 768)}
    if family in _LATENT:
        units = config.whole("moe_intermediate_size", 2048)
        return {
            "experts": config.whole("n_routed_experts", 256), "top_k": config.whole("num_experts_per_tok", 8),
            "expert_ffn": units, "shared_ffn": units * config.whole("n_shared_experts", 1),
            "dense_layers": config.whole("first_k_dense_replace", 3),
        }  # fmt: skip
    return {}


class _Config:
    """Reads values of a configuration, each with its type."""

    def __init__(self, found: Located) -> None:
        self.found = found
        if not isinstance(found.value, dict) and not hasattr(found.value, "keys"):
            raise PlanError(f"{found.where()}: want an object, as Hugging Face's config.json is")
        self.data = dict(found.value)

    def family(self) -> str:
        """Which of the known families it is."""
        said = self.data.get("model_type")
        known = ", ".join(FAMILIES)
        if said is None:
            raise PlanError(f"{self.found.where()}: the key 'model_type' is missing; known are {known}")
        if not isinstance(said, str) or said not in FAMILIES:
            raise PlanError(
                f"{self.found.where(('model_type',))}: model_type {said!r} is not known here; known are {known}"
            )
        return said

    def size(self, name: str, default: int | None = None) -> int:
        """A size under any of its names."""
        names = _NAMES[name]
        there = next((n for n in names if self.data.get(n) is not None), None)
        if there is not None:
            return self.whole(there, default)
        if default is None:
            raise PlanError(f"{self.found.where()}: the key {names[0]!r} is missing")
        return default

    def whole(self, name: str, default: int | None) -> int:
        """A whole number; the default where nothing, or null, is said."""
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 0:
            hint = f"; write {value.strip()}" if isinstance(value, str) and value.strip().isdecimal() else ""
            kind = "a negative number" if type(value) is int else f"a {spoken(value)}"
            raise PlanError(f"{self.found.where((name,))}: {name} is {value!r}, {kind}; want a whole number{hint}")
        return value

    def either(self, name: str, other: str, default: int) -> int:
        """A whole number under one of two names."""
        return self.whole(name if self.data.get(name) is not None else other, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(name)
        if value is not None and type(value) is not bool:
            raise PlanError(f"{self.found.where((name,))}: {name} is {value!r}, a {spoken(value)}; want true or false")
        return default if value is None else value

    def dropout(self) -> float:
        """Of the residual stream, under its names."""
        for name in ("resid_pdrop", "hidden_dropout"):
            value = self.data.get(name)
            if value is None:
                continue
            if type(value) not in (int, float) or not 0 <= value < 1:
                raise PlanError(f"{self.found.where((name,))}: {name} is {value!r}; want a number from 0 to 1")
            return float(value)
        return 0.0
