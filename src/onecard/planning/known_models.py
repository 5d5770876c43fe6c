"""Sizes of decoders that many know, under their names. Pure data, from the papers and model cards that are named."""

from __future__ import annotations

import difflib
from typing import Any

from onecard.errors import PlanError
from onecard.planning.transformer import Transformer

_LLAMA: dict[str, Any] = {"gated": True, "norm": "rms", "positions": "rotary", "bias": False}


def _llama(
    layers: int, hidden: int, heads: int, keys: int, ffn: int, vocab: int, sequence: int, **more: Any
) -> Transformer:
    return Transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=keys, ffn=ffn, vocab=vocab, sequence=sequence, **_LLAMA, **more
    )  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, vocab: int, sequence: int, tied: bool = True) -> Transformer:
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence, tied=tied)


MODELS: dict[str, Transformer] = {
    # Radford et al., 2019, as released: 1.5 billion is gpt2-xl.
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 50257, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    # Brown et al., 2020 (arXiv 2005.14165), table 2.1; the vocabulary as Megatron pads it (arXiv 2104.04473).
    "gpt3-175b": _gpt(96, 12288, 96, 51200, 2048),
    # Korthikanti et al., 2022 (arXiv 2205.05198), table 3.
    "megatron-22b": _gpt(48, 6144, 64, 51200, 2048),
    "megatron-530b": _gpt(105, 20480, 128, 51200, 2048),
    "megatron-1t": _gpt(128, 25600, 160, 51200, 2048),
    # Touvron et al., 2023 (arXiv 2307.09288), and the model cards.
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    # Llama team, 2024 (arXiv 2407.21783), table 3; trained on sequences of 8,192 tokens.
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    # Jiang et al., 2023 (arXiv 2310.06825), table 1.
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192),
    # DeepSeek-AI, 2024 (arXiv 2412.19437), section 4.2, without the module that predicts a second token.
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        4096,
        head_dim=128,
        kv_latent=512,
        q_latent=1536,
        rope_dim=64,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
    ),
}


def known_model(name: str) -> Transformer:
    """The sizes of a model by its name, however it is written.

    Raises:
        PlanError: no such name; says those that are near.

    Example:
        >>> known_model("LLaMA-3 70B").layers
        80
        >>> known_model("gpt4")
        Traceback (most recent call last):
        onecard.errors.PlanError: there is no model 'gpt4'; near are gpt2, gpt2-xl. Give a config.json, or sizes
    """
    plain = {_plain(known): sizes for known, sizes in MODELS.items()}
    if _plain(name) in plain:
        return plain[_plain(name)]
    near = sorted(difflib.get_close_matches(name.lower(), MODELS, 3, 0.5))
    said = f"near are {', '.join(near)}" if near else f"there are {', '.join(MODELS)}"
    raise PlanError(f"there is no model {name!r}; {said}. Give a config.json, or sizes")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
