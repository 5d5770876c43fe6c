"""Scaled dot-product attention. The CPU kernel runs here; GPU kernels are checked by their meta functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import mask, real

SAMPLES = [
    lambda: F.scaled_dot_product_attention(real(3, 4, 5, 8), real(3, 4, 5, 8), real(3, 4, 5, 8), is_causal=True),
    lambda: F.scaled_dot_product_attention(real(2, 3, 4, 8), real(2, 3, 6, 8), real(2, 3, 6, 8)),
    lambda: F.scaled_dot_product_attention(*(real(2, 3, 4, 8) for _ in range(3)), attn_mask=mask(4, 4).fill_(True)),
    lambda: F.scaled_dot_product_attention(
        *(real(2, 3, 4, 8) for _ in range(3)), attn_mask=real(2, 1, 4, 4, grad=False), scale=0.3
    ),
    lambda: F.scaled_dot_product_attention(
        *(real(2, 4, 4, 8) for _ in range(3)), attn_mask=real(1, 4, 4, 4, grad=False)
    ),
    lambda: F.scaled_dot_product_attention(
        real(2, 6, 4, 8), real(2, 2, 4, 8), real(2, 2, 4, 8), is_causal=True, enable_gqa=True
    ),
    lambda: F.scaled_dot_product_attention(
        real(2, 4, 4, 8), real(2, 1, 4, 8), real(2, 1, 4, 8), enable_gqa=True, attn_mask=real(2, 4, 4, 4, grad=False)
    ),
    # What falls back to plain products.
    lambda: F.scaled_dot_product_attention(real(3, 5, 8), real(3, 6, 8), real(3, 6, 8)),
    lambda: torch.ops.aten._scaled_dot_product_attention_math(
        real(2, 4, 4, 8), real(2, 2, 4, 8), real(2, 2, 4, 8), is_causal=True, enable_gqa=True
    ),
]
_GPU = "runs on a GPU only; its rule is checked against its meta function in tests/test_rows_structure.py"
ELSEWHERE = {
    f"_scaled_dot_product_{name}{backward}": _GPU
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
    for backward in ("", "_backward")
}
