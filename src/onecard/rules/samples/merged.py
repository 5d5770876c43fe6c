"""Dims of sizes with divisors, for rows whose other samples have few: ``verify`` takes these apart into merged dims."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import distinct, inside, integers, mask, positive, real

_REDUCED = "amax amin norm var std prod any all count_nonzero argmax argmin median mode aminmax"
_ALONG = (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin)

SAMPLES = [
    *(lambda f=getattr(torch, name), d=d: f(distinct(4, 6), dim=d) for name in _REDUCED.split() for d in (0, 1)),
    *(lambda f=f: f(positive(4, 6), 1) for f in _ALONG),
    lambda: distinct(4, 6).amax(),
    lambda: distinct(4, 6).prod(),
    lambda: distinct(4, 6).any(),
    lambda: distinct(4, 6).all(),
    lambda: distinct(4, 6).min(),
    lambda: torch.aminmax(distinct(4, 6)),
    lambda: torch.std_mean(real(4, 6), 0),
    lambda: torch.var_mean(real(4, 6)),
    lambda: torch.linalg.vector_norm(real(4, 6), 3, 0),
    lambda: torch.linalg.vector_norm(real(4, 6)),
    lambda: distinct(4, 6).kthvalue(2, 1),
    lambda: distinct(4, 6).nanmedian(0),
    lambda: torch.histc(real(4, 6, grad=False), 3),
    lambda: torch.flip(real(4, 6), [1]),
    lambda: torch.roll(real(4, 6), 1, 1),
    lambda: torch.rot90(real(4, 4, 6), 1, (0, 1)),
    lambda: torch.trace(real(4, 3)),
    lambda: torch.take(real(4, 3), integers(12, 4, 6)),
    lambda: real(4, 6, grad=False).put_(integers(24, 4), real(4, grad=False)),
    lambda: real(4, 6, grad=False).index_fill_(1, integers(6, 2), 1.0),
    lambda: real(4, 6, grad=False).index_copy_(1, torch.tensor([1, 4]), real(4, 2, grad=False)),
    lambda: real(4, 6).split([1, 3], 0),
    lambda: torch.unsafe_split(real(4, 6), 3, 1),
    lambda: F.glu(real(4, 6), 1),
    lambda: F.channel_shuffle(real(4, 6, 2, 2), 3),
    lambda: F.soft_margin_loss(real(4, 6), real(4, 6, grad=False).sign()),
    lambda: F.binary_cross_entropy(inside(4, 6), inside(4, 6, grad=False)),
    lambda: F.nll_loss(real(4, 6, 2, 2), integers(6, 4, 2, 2), reduction="sum"),
    lambda: F.multilabel_margin_loss(real(4, 6), integers(6, 4, 6)),
    lambda: F.layer_norm(real(4, 6, 3), (3,), real(3), real(3)),
    lambda: F.pad(real(4, 6, 3, 3), (1, 1, 1, 1), "reflect"),
    lambda: F.pad(real(4, 6, 3, 3), (1, 1, 1, 1), "replicate"),
    lambda: F.interpolate(real(4, 6, 3), scale_factor=2),
    lambda: F.interpolate(real(4, 6, 3), scale_factor=2, mode="linear"),
    lambda: F.interpolate(real(4, 6, 3, 3), size=(2, 2), mode="bilinear", antialias=True),
    lambda: F.max_unpool2d(*F.max_pool2d(real(4, 6, 4, 4), 2, return_indices=True), 2),
    lambda: F.avg_pool3d(real(4, 6, 2, 2, 2), 2),
    lambda: F.adaptive_max_pool3d(real(4, 6, 2, 2, 2), 1),
    lambda: F.grid_sample(real(4, 6, 2, 2, 2), inside(4, 2, 2, 2, 3), align_corners=False),
    lambda: torch.where(mask(4, 6), real(4, 6), real(6)),
]
