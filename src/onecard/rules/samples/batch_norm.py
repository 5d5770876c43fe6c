"""Batch norm in training and in evaluation, with and without running statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import positive, real

aten = torch.ops.aten


def _stats(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return real(channels, grad=False), positive(channels, grad=False)


SAMPLES = [
    lambda: F.batch_norm(real(5, 4, 2, 3), *_stats(4), real(4), real(4), training=True),
    lambda: F.batch_norm(real(5, 4), *_stats(4), real(4), real(4), training=True, momentum=0.3),
    lambda: F.batch_norm(real(5, 4, 3), None, None, real(4), real(4), training=True),
    lambda: F.batch_norm(real(5, 4, 3), None, None, training=True),
    lambda: F.batch_norm(real(5, 4, 2, 3), *_stats(4), real(4), real(4)),
    lambda: F.batch_norm(real(5, 4, 3), *_stats(4)),
    lambda: F.batch_norm(real(5, 4, 3, grad=False), *_stats(4), real(4), real(4), training=True),
    lambda: F.instance_norm(real(3, 4, 5), weight=real(4), bias=real(4)),
    lambda: aten._native_batch_norm_legit(real(5, 4, 3), real(4), real(4), *_stats(4), True, 0.1, 1e-5),
    lambda: aten._native_batch_norm_legit(real(5, 4, 3), real(4), real(4), True, 0.1, 1e-5),
    lambda: aten._batch_norm_with_update(real(5, 4, 3), real(4), real(4), *_stats(4), 0.1, 1e-5)[0],
    lambda: aten._batch_norm_no_update(real(5, 4, 3), real(4), real(4), *_stats(4), 0.1, 1e-5)[0],
]
ELSEWHERE = {
    "cudnn_batch_norm": "CUDA only",
    "cudnn_batch_norm_backward": "CUDA only",
    "miopen_batch_norm": "ROCm only",
    "miopen_batch_norm_backward": "ROCm only",
}
