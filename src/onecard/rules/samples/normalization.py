"""Layer, RMS and group norm."""

from __future__ import annotations

import torch.nn.functional as F

from onecard.rules.samples.data import real

SAMPLES = [
    lambda: F.layer_norm(real(5, 3, 4), (4,), real(4), real(4)),
    lambda: F.layer_norm(real(5, 3, 4), (3, 4), real(3, 4), real(3, 4)),
    lambda: F.layer_norm(real(5, 4), (4,)),
    lambda: F.layer_norm(real(5, 4), (4,), real(4)),
    lambda: F.layer_norm(real(4), (4,), real(4), real(4)),
    lambda: F.layer_norm(real(5, 4, grad=False), (4,), real(4), real(4)),
    lambda: F.layer_norm(real(4, 5).t(), (4,), real(4), real(4)),
    lambda: F.rms_norm(real(5, 3, 4), (4,), real(4)),
    lambda: F.rms_norm(real(5, 3, 4), (3, 4)),
    lambda: F.group_norm(real(3, 4, 2, 3), 2, real(4), real(4)),
    lambda: F.group_norm(real(3, 6, 5), 3, real(6), real(6)),
    lambda: F.group_norm(real(3, 6, 5), 6),
    lambda: F.group_norm(real(3, 6, 5), 1, real(6)),
    lambda: F.group_norm(real(3, 6), 2, real(6), real(6)),
    lambda: F.group_norm(real(3, 4, 2, 3, grad=False), 2, real(4), real(4)),
]
ELSEWHERE = dict.fromkeys(("_fused_rms_norm", "_fused_rms_norm_backward"), "fused on CUDA only; a CPU decomposes it")
