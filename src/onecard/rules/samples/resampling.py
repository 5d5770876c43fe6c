"""Pooling, interpolation and their like."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import distinct, real

aten = torch.ops.aten


def _resize(mode: str, *shape: int, **options: bool) -> torch.Tensor:
    return F.interpolate(real(*shape), scale_factor=2.0, mode=mode, **options)


def _unpool(pool: str, unpool: str, *shape: int) -> torch.Tensor:
    return getattr(F, unpool)(*getattr(F, pool)(distinct(*shape), 2, return_indices=True), 2)


SAMPLES = [
    lambda: F.max_pool1d(distinct(4, 3, 6), 2),
    lambda: F.max_pool2d(distinct(4, 3, 6, 4), 2, stride=1, padding=1),
    lambda: F.max_pool2d(distinct(3, 6, 4), 2),
    lambda: F.max_pool3d(distinct(2, 3, 4, 4, 2), 2),
    lambda: F.avg_pool1d(real(4, 3, 6), 2),
    lambda: F.avg_pool2d(real(4, 3, 6, 4), 2, padding=1, count_include_pad=False),
    lambda: F.avg_pool2d(real(3, 4, 4), 2),
    lambda: F.avg_pool3d(real(2, 3, 4, 4, 2), 2),
    lambda: F.adaptive_avg_pool1d(real(4, 3, 7), 3),
    lambda: F.adaptive_avg_pool2d(real(4, 3, 5, 7), (2, 3)),
    lambda: F.adaptive_avg_pool2d(real(4, 3, 5, 7), 1),
    lambda: F.adaptive_avg_pool3d(real(2, 3, 4, 5, 3), 2),
    lambda: F.adaptive_max_pool1d(distinct(4, 3, 7), 3),
    lambda: F.adaptive_max_pool2d(distinct(4, 3, 5, 7), (2, 3)),
    lambda: F.adaptive_max_pool3d(distinct(2, 3, 4, 5, 3), 2),
    lambda: F.lp_pool2d(real(2, 3, 4, 4), 2.0, 2),
    lambda: _unpool("max_pool2d", "max_unpool2d", 2, 3, 4, 4),
    lambda: _unpool("max_pool3d", "max_unpool3d", 2, 3, 4, 4, 2),
    lambda: F.fractional_max_pool2d(
        distinct(2, 3, 5, 5), 2, 3, _random_samples=torch.rand(2, 3, 2, dtype=torch.float64)
    ),
    lambda: F.fractional_max_pool3d(
        distinct(2, 2, 5, 5, 5), 2, 3, _random_samples=torch.rand(2, 2, 3, dtype=torch.float64)
    ),
    *[lambda mode=mode: _resize(mode, 2, 3, 5) for mode in ("nearest", "nearest-exact", "linear")],
    *[lambda mode=mode: _resize(mode, 4, 3, 4, 3) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")],
    *[lambda mode=mode: _resize(mode, 2, 3, 4, 3, 2) for mode in ("nearest", "nearest-exact", "trilinear")],
    *[lambda mode=mode: _resize(mode, 2, 3, 4, 3, antialias=True) for mode in ("bilinear", "bicubic")],
    lambda: _resize("bilinear", 2, 3, 4, 3, align_corners=True),
    # New in torch 2.13.
    *[lambda: aten._upsample_lanczos2d_aa(real(2, 3, 4, 3), [6, 5], False)] * hasattr(aten, "_upsample_lanczos2d_aa"),
    lambda: F.pixel_shuffle(real(2, 12, 3, 2), 2),
    lambda: F.pixel_unshuffle(real(4, 3, 4, 2), 2),
    lambda: torch.channel_shuffle(real(2, 6, 3), 2),
    lambda: F.unfold(real(2, 3, 5, 4), (2, 3), padding=1),
    lambda: F.fold(real(2, 12, 6), (3, 4), 2),
    lambda: F.unfold(real(3, 5, 4), 2),
    lambda: F.grid_sample(real(2, 3, 5, 4), real(2, 4, 3, 2), align_corners=False),
    lambda: F.grid_sample(real(2, 3, 3, 3, 3), real(2, 2, 3, 2, 3), mode="nearest", align_corners=True),
    lambda: F.grid_sample(real(2, 3, 5, 4, grad=False), real(2, 4, 3, 2), align_corners=False),
    lambda: F.affine_grid(real(4, 2, 3), [4, 3, 2, 5], align_corners=False),
]
