"""Reductions over some dims and over all, kept and not."""

from __future__ import annotations

import torch

from onecard.rules.samples.data import distinct, inside, integers, mask, positive, real

aten = torch.ops.aten

_DIMS = ((), (0,), (-1,), (0, 2), (0, 1, 2))
_SHAPE = (5, 3, 2)
_FULL = (
    "sum mean prod amax amin max min median nanmedian any all argmax argmin nansum count_nonzero aminmax norm std var"
)
_LISTED = (torch.sum, torch.mean, torch.amax, torch.amin)
_MOMENTS = (torch.var, torch.std, torch.var_mean, torch.std_mean)
_ALONG = "prod max min median nanmedian mode argmax argmin any all"
_RUNNING = (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin)
_NORMS = (2, 1, 3.5, 0, float("inf"), float("-inf"), -1.5)


def _holes() -> torch.Tensor:
    x = real(4, 6, grad=False)
    x[1, 2:] = float("nan")
    return x


SAMPLES = [
    *(lambda f=getattr(torch, name): f(distinct(*_SHAPE)) for name in _FULL.split()),
    *(lambda f=f, d=d, k=k: f(distinct(*_SHAPE), d, keepdim=k) for f in _LISTED for d in _DIMS for k in (False, True)),
    *(
        lambda f=f, d=d, k=k: f(distinct(*_SHAPE), d, keepdim=k)
        for f in _MOMENTS
        for d in _DIMS[1:]
        for k in (False, True)
    ),
    *(lambda f=getattr(torch, n), d=d: f(distinct(*_SHAPE), d) for n in _ALONG.split() for d in (0, -1)),
    *(lambda f=getattr(torch, n): f(distinct(*_SHAPE), 0, keepdim=True) for n in _ALONG.split()),
    *(lambda f=f, d=d: f(positive(*_SHAPE), d) for f in _RUNNING for d in (0, -1)),
    *(lambda p=p: torch.linalg.vector_norm(real(*_SHAPE), p) for p in _NORMS),
    *(lambda p=p: torch.linalg.vector_norm(real(*_SHAPE), p, dim=(0, 2), keepdim=True) for p in _NORMS),
    *(lambda p=p: aten.norm(real(*_SHAPE), p, [1]) for p in (2, 1)),
    lambda: aten.norm(real(*_SHAPE), None, [1], True, dtype=torch.float64),
    lambda: real(*_SHAPE).sum(0, dtype=torch.float32),
    lambda: real(*_SHAPE).mean(1, dtype=torch.float32),
    lambda: integers(5, *_SHAPE).sum((0, 1)),
    lambda: integers(5, *_SHAPE).prod(),
    lambda: integers(5, *_SHAPE).amax(0),
    lambda: integers(5, *_SHAPE).cumsum(1),
    lambda: integers(99, *_SHAPE).argmax(0),
    lambda: mask(*_SHAPE).sum(0),
    lambda: mask(*_SHAPE).any(),
    lambda: mask(*_SHAPE).all((0, 1)),
    lambda: aten.any(mask(*_SHAPE), dim=[]),
    lambda: aten._is_all_true(mask(*_SHAPE)),
    lambda: aten._is_any_true(mask(*_SHAPE)),
    lambda: _holes().nansum(1),
    lambda: real(*_SHAPE).nansum((0, 2), keepdim=True),
    lambda: _holes().max(1),
    lambda: _holes().argmin(),
    lambda: torch.count_nonzero(mask(*_SHAPE), (0, 2)),
    lambda: torch.aminmax(real(*_SHAPE), dim=0, keepdim=True),
    lambda: torch.max(real(4, 3), real(4, 3)),
    lambda: torch.kthvalue(distinct(*_SHAPE), 2, 0),
    lambda: torch.var(real(*_SHAPE), (0, 1), correction=0),
    lambda: torch.std(torch.complex(real(4, 3, grad=False), real(4, 3, grad=False)), 0),
    lambda: torch.logsumexp(real(*_SHAPE), 0),
    lambda: torch.logsumexp(real(*_SHAPE), (0, 2), keepdim=True),
    lambda: torch.logsumexp(integers(5, *_SHAPE), (1,)),
    lambda: torch.logsumexp(torch.full((4, 3), float("-inf")), 1),
    lambda: real(1, 5).sum(0),
    lambda: real(1, 5).mean(0, keepdim=True),
    lambda: real().sum(),
    lambda: inside(1).amax(),
    lambda: torch.histc(real(5, 3, grad=False), 4, -1.0, 1.0),
    lambda: torch.histc(real(7, grad=False), 3, 0, 2),
    lambda: real(4, 3, 2, grad=False).renorm_(2.0, 1, 1.0),
    lambda: real(4, 3, grad=False).renorm_(1.0, 0, 0.5),
]
