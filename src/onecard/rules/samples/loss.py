"""Losses with every reduction, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import inside, integers, real

_REDUCTIONS = ("none", "mean", "sum")
_ELEMENTS = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss)
_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5], dtype=torch.float64)


def _signs(*shape: int) -> torch.Tensor:
    return integers(2, *shape).double() * 2 - 1


def _few(*shape: int) -> torch.Tensor:
    return real(*shape, grad=False)


SAMPLES = [
    *(lambda f=f, r=r: f(real(5, 3), real(5, 3), reduction=r) for f in _ELEMENTS for r in _REDUCTIONS),
    *(lambda f=f: f(real(1, 6), real(1, 6)) for f in _ELEMENTS),
    *(lambda r=r: F.soft_margin_loss(real(5, 3), _signs(5, 3), reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.binary_cross_entropy(inside(5, 3), inside(5, 3, grad=False), reduction=r) for r in _REDUCTIONS),
    *(
        lambda r=r: F.binary_cross_entropy(
            inside(5, 3), inside(5, 3, grad=False), weight=inside(3, grad=False), reduction=r
        )
        for r in _REDUCTIONS
    ),
    *(
        lambda r=r: F.binary_cross_entropy_with_logits(
            real(5, 3), inside(5, 3), inside(5, 1, grad=False), pos_weight=inside(3, grad=False), reduction=r
        )
        for r in _REDUCTIONS
    ),
    *(lambda r=r: F.binary_cross_entropy_with_logits(real(4, 3), inside(4, 3), reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.kl_div(real(5, 3), inside(5, 3), reduction=r) for r in ("none", "batchmean", "sum")),
    *(lambda r=r: F.nll_loss(real(6, 5), integers(5, 6), reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(6, 5), integers(5, 6), _WEIGHTS, reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(6, 5), integers(5, 6), _WEIGHTS, ignore_index=2, reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(6, 5), integers(5, 6) - 1, ignore_index=-1, reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(5), integers(5), _WEIGHTS, reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(2, 5, 3, 2), integers(5, 2, 3, 2), _WEIGHTS, reduction=r) for r in _REDUCTIONS),
    *(lambda r=r: F.nll_loss(real(2, 5, 3, 2), integers(5, 2, 3, 2), reduction=r) for r in _REDUCTIONS),
    lambda: F.nll_loss(real(2, 5, 4), integers(5, 2, 4)),
    lambda: F.cross_entropy(real(6, 5), integers(5, 6), label_smoothing=0.1),
    lambda: F.cross_entropy(real(6, 5), real(6, 5).softmax(-1)),
    *(lambda r=r: F.multi_margin_loss(real(5, 4), integers(4, 5), reduction=r) for r in _REDUCTIONS),
    lambda: F.multi_margin_loss(real(6, 5), integers(5, 6), p=2, margin=0.7, weight=_WEIGHTS),
    lambda: F.multi_margin_loss(real(5), integers(5)),
    *(lambda r=r: F.multilabel_margin_loss(real(5, 4), integers(4, 5, 4, low=-1), reduction=r) for r in _REDUCTIONS),
    lambda: F.multilabel_margin_loss(real(4), integers(4, 4, low=-1)),
    lambda: F.poisson_nll_loss(real(5, 3), inside(5, 3)),
    lambda: F.hinge_embedding_loss(real(5, 3), _signs(5, 3)),
    lambda: F.margin_ranking_loss(real(5), real(5), _signs(5)),
    lambda: F.cosine_embedding_loss(real(5, 3), real(5, 3), _signs(5)),
    lambda: F.triplet_margin_loss(real(5, 3), real(5, 3), real(5, 3)),
]
