"""Sizes of the models that torchtitan knows by name and flavor.

Source: ``torchtitan/models/llama3/__init__.py`` and ``torchtitan/models/qwen3/__init__.py`` of pytorch/torchtitan.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"vocab": 128256, "norm": "rms", "positions": "rotary", "bias": False, "gated": True}
_QWEN3 = {
    "vocab": 151936,
    "norm": "rms",
    "positions": "rotary",
    "bias": False,
    "gated": True,
    "qk_norm": True,
    "head_dim": 128,
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, **more}


FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        name: _LLAMA3 | sizes
        for name, sizes in {
            "debugmodel": _sizes(6, 256, 16, 16, 768, vocab=2048),
            "8B": _sizes(32, 4096, 32, 8, 14336),
            "70B": _sizes(80, 8192, 64, 8, 28672),
            "405B": _sizes(126, 16384, 128, 8, 53248),
        }.items()
    },
    "qwen3": {
        name: _QWEN3 | sizes
        for name, sizes in {
            "0.6B": _sizes(28, 1024, 16, 8, 3072, tied=True),
            "1.7B": _sizes(28, 2048, 16, 8, 6144, tied=True),
            "4B": _sizes(36, 2560, 32, 8, 9728, tied=True),
            "8B": _sizes(36, 4096, 32, 8, 12288),
            "14B": _sizes(40, 5120, 40, 8, 17408),
            "32B": _sizes(64, 5120, 64, 8, 25600),
        }.items()
    },
}


def flavor_of(sizes: dict[str, Any]) -> tuple[str, str] | None:
    """The name and flavor of a model with these sizes, the vocabulary's padding aside; None if there is none.

    Example:
        >>> flavor_of(FLAVORS["llama3"]["70B"])
        ('llama3', '70B')
    """
    for name, flavors in FLAVORS.items():
        for flavor, known in flavors.items():
            padded = known["vocab"] <= sizes.get("vocab", 0) < known["vocab"] * 1.05
            if padded and all(sizes.get(field) == value for field, value in known.items() if field != "vocab"):
                return name, flavor
    return None
