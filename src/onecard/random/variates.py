"""Variates whose parameters differ from element to element: gamma, Poisson, binomial. By inversion or rejection.

Whoever is rejected tries again with the Philox block of (index in the whole, round), so that nothing depends on who else
is in the tensor. Computed in float64, in pieces that stay in the cache, by functions that give the same bits wherever
an element stands (``pow`` does not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecard.errors import DispatchError
from onecard.random.key import Key, RowShare, tracing
from onecard.random.laws import bits53
from onecard.random.parts import CHUNK, CHUNK_ELSEWHERE, in_batch, words_at
from onecard.random.philox import MASK
from onecard.recorded import one_node

Variates = Callable[["_Uniforms", Sequence[Tensor]], Tensor]
Attempt = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, Tensor]]  # u, v, params -> values, accepted
STEPS = 150  # of an inversion with a mean below 10: by then all of 1 - 2**-53 is behind


@one_node(is_pure=True)
def variates(name: str, params: Sequence[Tensor], key: Key, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """A part of a whole tensor of variates.

    Args:
        name: "gamma" (parameter: shape; scale 1), "poisson" (mean) or "binomial" (count, probability).
        params: the parts of the parameters; all of one shape, that of the result.
        key: of this draw; its ``share`` as in ``fill``.
        shape: of the whole tensor.
        offset: where the part begins in the whole.

    Returns:
        A float64 tensor. NaN where a parameter is NaN.

    Source: G. Marsaglia, W. W. Tsang, "A simple method for generating gamma variables", ACM TOMS 2000; W. Hörmann, "The
    transformed rejection method for generating Poisson random variables", IME 1993 (PTRS), and "The generation of
    binomial random variates", JSCS 1993 (BTRS); for means below 10 inversion.

    Example:
        >>> means = torch.tensor([1.0, 100.0, 10000.0])
        >>> whole = variates("poisson", [means], Key(1, 2), (3,), (0,))
        >>> torch.equal(variates("poisson", [means[1:]], Key(1, 2), (3,), (1,)), whole[1:])
        True
    """
    if tracing():
        raise DispatchError(
            f"{name} variates while a graph is traced: how often an element is rejected depends on its value. Draw them "
            "outside the graph"
        )
    part = params[0].shape
    index = _positions(part, shape, offset, params[0].device, key.share)
    flat = [p.reshape(-1).to(torch.float64) for p in params]
    out = torch.empty(index.shape, dtype=torch.float64, device=index.device)
    size = CHUNK.get(index.device.type, CHUNK_ELSEWHERE)
    for begin in range(0, len(index), size):
        piece = slice(begin, begin + size)
        out[piece] = _VARIATES[name](_Uniforms(index[piece], key), [p[piece] for p in flat])
    return out.view(part)


def _positions(
    part: Sequence[int],
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device,
    share: RowShare | None = None,
) -> Tensor:
    """Row-major indices in the whole of all elements of a part."""
    if share is not None:
        found = torch.empty(part, dtype=torch.int64, device=device)
        for piece, batch, begin in in_batch(found, shape, offset, share):
            piece.copy_(_positions(piece.shape, batch, begin, device).view(piece.shape))
        return found.view(-1)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for count, size, start in zip(part, shape, offset, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, start + count, device=device)
    return index.reshape(-1)


class _Uniforms:
    """Two uniform numbers of (0, 1) for each element and round."""

    def __init__(self, index: Tensor, key: Key) -> None:
        self.index, self.key = index, key

    def draw(self, turn: int, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        index = self.index if among is None else self.index[among]
        # The last counter word keeps them apart from what ``fill`` draws.
        words = words_at((index & MASK, index >> 32, turn, 2), self.key)
        u, v = (bits53(high, low).to(torch.float64).add_(0.5).mul_(2.0**-53) for high, low in (words[:2], words[2:]))
        return u, v

    def until_accepted(self, attempt: Attempt, params: Sequence[Tensor], among: Tensor) -> Tensor:
        """The values that an attempt accepts, for the elements ``among`` all, in their order."""
        out = torch.full(among.shape, torch.nan, dtype=torch.float64, device=among.device)
        left = torch.arange(len(among), device=among.device)
        turn = 1
        while len(left):
            mine = [p[among[left]] for p in params]
            values, accepted = attempt(*self.draw(turn, among[left]), mine)
            out[left[accepted]] = values[accepted]
            left = left[~accepted]
            turn += 1
        return out


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().flatten()


def _gamma(draws: _Uniforms, params: Sequence[Tensor]) -> Tensor:
    (a,) = params
    out = torch.full_like(a, torch.nan)
    valid = _where(a >= 0)
    small = a < 1
    out[valid] = draws.until_accepted(_marsaglia_tsang, [torch.where(small, a + 1, a)], valid)
    boost = draws.draw(0)[0].log_().div_(a).exp_()  # u ** (1 / a)
    return torch.where(small, out * boost, out)


def _marsaglia_tsang(u: Tensor, v: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    d = params[0] - 1 / 3
    # A normal of 2 * 26 bits (Box and Muller), and what is left of the second number to decide.
    angle, rest = (v * 2.0**26).floor(), (v * 2.0**26).frac()
    x = (u.log() * -2).sqrt_() * (angle * (2 * torch.pi * 2.0**-26)).cos_()
    cube = 1 + x / (d * 9).sqrt_()
    cube = cube * cube * cube
    accepted = (cube > 0) & (rest.clamp(min=2.0**-27).log() < x * x / 2 + d - d * cube + d * cube.log())
    return d * cube, accepted


def _poisson(draws: _Uniforms, params: Sequence[Tensor]) -> Tensor:
    (mean,) = params
    out = torch.full_like(mean, torch.nan)
    few, many = _where(mean < 10), _where(mean >= 10)
    out[few] = _invert(draws.draw(0, few)[0], (-mean[few]).exp_(), lambda k: mean[few] / k)
    out[many] = draws.until_accepted(_ptrs, params, many)
    return out


def _invert(u: Tensor, probability: Tensor, ratio: Callable[[int], Tensor]) -> Tensor:
    """The least k whose cumulated probability is not below u, from that of 0 and the ratios of k to k - 1."""
    count, below = torch.zeros_like(u), probability.clone()
    for k in range(1, STEPS):
        more = u > below
        if not bool(more.any()):
            break
        count += more
        probability = probability * ratio(k)
        below += probability
    return count


def _ptrs(u: Tensor, v: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    (mean,) = params
    b = 0.931 + 2.53 * mean.sqrt()
    a = -0.059 + 0.02483 * b
    u, near = u - 0.5, 0.5 - (u - 0.5).abs()
    k = ((2 * a / near + b) * u + mean + 0.43).floor_()
    inside = (near >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
    scale = v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (near * near) + b)
    under = scale.log() <= k * mean.log() - mean - (k + 1).lgamma()
    return k, inside | ((k >= 0) & under & ~((near < 0.013) & (v > near)))


def _binomial(draws: _Uniforms, params: Sequence[Tensor]) -> Tensor:
    count, p = params
    rarer = torch.minimum(p, 1 - p)
    mean = count * rarer
    out = torch.full_like(p, torch.nan)
    few, many = _where(mean < 10), _where(mean >= 10)
    n, q = count[few].clamp(min=0), rarer[few].clamp(min=0)
    start = (n * (-q).log1p()).exp_()
    odds = q / (1 - q)
    out[few] = torch.minimum(_invert(draws.draw(0, few)[0], start, lambda k: (n - k + 1) / k * odds), n)
    out[many] = draws.until_accepted(_btrs, [count, rarer], many)
    return torch.where(p > 0.5, count - out, out)


def _btrs(u: Tensor, v: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    n, p = params
    spread = (n * p * (1 - p)).sqrt_()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    u, near = u - 0.5, 0.5 - (u - 0.5).abs()
    k = ((2 * a / near + b) * u + n * p + 0.5).floor_()
    inside = (near >= 0.07) & (v <= 0.92 - 4.2 / b)
    possible = (k >= 0) & (k <= n)
    k = torch.minimum(k.clamp_(min=0), n)
    mode = ((n + 1) * p).floor_()
    scale = v * (2.83 + 5.1 / b) * spread / (a / (near * near) + b)
    height = (mode + 1).lgamma() + (n - mode + 1).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()
    under = scale.log() <= height + (k - mode) * (p / (1 - p)).log()
    return k, possible & (inside | under)


_VARIATES: dict[str, Variates] = {"gamma": _gamma, "poisson": _poisson, "binomial": _binomial}
