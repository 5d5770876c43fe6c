"""Training programs of models of transformers, as the library builds them, of sizes that train in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from plan_programs import Program
from torch import Tensor, nn

_SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 24, "n_positions": 8},
    "LlamaForCausalLM": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"num_key_value_heads": 1, "head_dim": 8},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "GPTNeoXForCausalLM": {},
    "PhiForCausalLM": {},
    "BertForMaskedLM": {},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 4},
    "ElectraForMaskedLM": {"embedding_size": 16},
}
_COMMON = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 24,
    "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def library() -> dict[str, Program]:
    """All of them, by name."""
    return {name: Program(_of_transformers(name), _batch(name), _own_loss) for name in _SIZES}


def _own_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    given = {"pixel_values": x} if x.is_floating_point() else {"input_ids": x}
    loss: Tensor = model(**given, labels=y).loss
    return loss


def _batch(name: str) -> Callable[[], tuple[Tensor, ...]]:
    if "Image" in name:
        return _images(8)
    return lambda: (torch.randint(3, 24, (8, 6)), torch.randint(3, 24, (8, 6)))


def _images(side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(8, 3, side, side), torch.randint(4, (8,)))


def _of_transformers(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        kind: Any = getattr(transformers, name)
        sizes = {**(_COMMON if name != "GPT2LMHeadModel" else {}), **_SIZES[name]}
        config = kind.config_class(**sizes)
        for field, value in vars(config).items():
            if "drop" in field and isinstance(value, float):
                setattr(config, field, 0.0)
        made: nn.Module = kind(config)
        return made

    return build
