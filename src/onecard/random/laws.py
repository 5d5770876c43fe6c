"""Laws: how the 32-bit words of Philox become values. One for each in-place random operator of torch.

Transcendental functions see contiguous tensors only, on which torch gives the same bits wherever an element stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onecard.random.philox import MASK

Values = Callable[[Sequence[Tensor]], list[Tensor]]
_UNIT_BITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}  # 24 for all others


@dataclass(frozen=True, slots=True)
class Law:
    """How values come from bits.

    Attributes:
        words: 32-bit words for each element: 1, 2 or 4.
        values: the four words of blocks, int64 tensors -> for each of the ``4 // words`` elements a tensor.
        made: the arguments of ``law`` that gave it.
    """

    words: int
    values: Values = field(compare=False)
    made: tuple[Any, ...] = ()


def law(name: str, dtype: torch.dtype, *params: Any) -> Law:
    """The law of an in-place random operator, such as ``law("normal_", torch.float32, mean, std)``.

    The parameters and their defaults are torch's; they are not checked here.

    * ``uniform_``: 24 random bits for float32, 53 for float64, 11 for float16, 8 for bfloat16; below ``high`` always.
    * ``normal_``: the method of Box and Muller (1958) on pairs of elements, with 32 bits (float64: 53) for each variate.
    * ``bernoulli_``: one where a 32-bit word is below p * 2**32, so p is kept to 2**-33.
    * ``random_``: the high word of (64 random bits) * range / 2**64; 128 bits for ranges over 2**32. A value's
      probability is off by 2**-32 of itself at most (2**-64 for the long ranges).
    * ``exponential_``, ``cauchy_``, ``geometric_``, ``log_normal_``: by inversion, or from a normal.
    * ``words``: the bits themselves, for int64.
    """
    return replace(_LAWS[name](dtype, *params), made=(name, dtype, *params))


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def bits53(high: Tensor, low: Tensor) -> Tensor:
    """53 bits of two words."""
    return high.bitwise_left_shift(21).bitwise_or_(low >> 11)


def _each(dtype: torch.dtype, make: Callable[[Tensor, int], Tensor]) -> Law:
    """A law of one integer for each element: ``make(integer, bits)``, with 53 bits for float64, else 32."""
    if _compute(dtype) is torch.float64:
        return Law(2, lambda w: [make(bits53(w[0], w[1]), 53), make(bits53(w[2], w[3]), 53)])
    return Law(1, lambda w: [make(word, 32) for word in w])


def _above_zero(integer: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """A uniform float in (0, 1]."""
    return integer.to(_compute(dtype)).add_(1).mul_(2.0**-bits)


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Law:
    real = dtype.to_real() if dtype.is_complex else dtype
    kept = _UNIT_BITS.get(real, 24)
    below = float(
        torch.nextafter(torch.tensor(high, dtype=real, device="cpu"), torch.tensor(low, dtype=real, device="cpu"))
    )

    def make(integer: Tensor, bits: int) -> Tensor:
        unit = (integer >> (bits - kept)).to(_compute(real)).mul_(2.0**-kept)
        if (low, high) == (0.0, 1.0):
            return unit
        # Rounding may reach the upper end, which is not in the interval.
        return unit.mul_(high - low).add_(low).to(real).clamp_(min(low, below), below)

    return _each(real, make)


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Law:
    if dtype.is_complex:
        std /= math.sqrt(2)  # of each of the two parts, as torch has it

    def pair(radius: Tensor, angle: Tensor, bits: int) -> list[Tensor]:
        r = _above_zero(radius, bits, dtype).log_().mul_(-2).sqrt_()
        turn = angle.to(_compute(dtype)).mul_(2 * math.pi * 2.0**-bits)
        both = [torch.cos(turn).mul_(r), torch.sin(turn).mul_(r)]
        return both if (mean, std) == (0.0, 1.0) else [x.mul_(std).add_(mean) for x in both]

    if _compute(dtype) is torch.float64:
        return Law(2, lambda w: pair(bits53(w[0], w[1]), bits53(w[2], w[3]), 53))
    return Law(1, lambda w: [*pair(w[0], w[1], 32), *pair(w[2], w[3], 32)])


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Law:
    normal = _normal(dtype, mean, std)
    return Law(normal.words, lambda w: [x.exp_() for x in normal.values(w)])


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Law:
    threshold = round(p * 2**32)
    return Law(1, lambda w: [word < threshold for word in w])


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Law:
    least = torch.finfo(_compute(dtype)).eps / 2  # zero is left out, as torch does: multinomial divides by it

    def make(integer: Tensor, bits: int) -> Tensor:
        return _above_zero(integer, bits, dtype).log_().neg_().clamp_(min=least).mul_(1 / rate)

    return _each(dtype, make)


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Law:
    def make(integer: Tensor, bits: int) -> Tensor:
        centred = (integer - 2 ** (bits - 1)).to(_compute(dtype)).add_(0.5).mul_(math.pi * 2.0**-bits)
        return centred.tan_().mul_(sigma).add_(median)

    return _each(dtype, make)


def _geometric(dtype: torch.dtype, p: float) -> Law:
    scale = 1 / math.log1p(-p) if p < 1 else 0.0

    def make(integer: Tensor, bits: int) -> Tensor:
        return _above_zero(integer, bits, dtype).log_().mul_(scale).ceil_().clamp_(min=1)

    return _each(dtype, make)


def _random(dtype: torch.dtype, low: int = 0, high: int | None = None) -> Law:
    """Integers of [low, high); without ``high`` up to the largest that the dtype holds exactly."""
    return _range(low, (_largest(dtype) + 1 if high is None else high) - low)


def _range(low: int, count: int) -> Law:
    if count <= 2**32:
        return Law(2, lambda w: [_scaled(w[:2], count).add_(low), _scaled(w[2:], count).add_(low)])
    return Law(4, lambda w: [_scaled(w, count).add_(low)])


def _largest(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 1
    # Every integer up to this is a float of the dtype.
    return 2 ** _DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max


_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _scaled(words: Sequence[Tensor], count: int) -> Tensor:
    """floor(W * count / 2**(32 * len(words))) of the number W with these words, least significant first, in 64 bits."""
    factors = [count & MASK, count >> 32 & MASK, count >> 64] if count > 2**32 else [count]
    columns: list[Any] = [0] * (len(words) + len(factors) + 1)
    for i, word in enumerate(words):
        for j, factor in enumerate(factors):
            if factor:
                product = word * factor
                columns[i + j] = columns[i + j] + (product & MASK)
                columns[i + j + 1] = columns[i + j + 1] + ((product >> 32) & MASK)
    for i in range(len(columns) - 1):
        columns[i + 1] = columns[i + 1] + (columns[i] >> 32)
        columns[i] = columns[i] & MASK
    low, high = columns[len(words)], columns[len(words) + 1]
    return low | (high << 32)


def _words(dtype: torch.dtype) -> Law:
    return Law(1, lambda w: list(w))


_LAWS: dict[str, Callable[..., Law]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "log_normal_": _log_normal,
    "bernoulli_": _bernoulli,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "random_": _random,
    "words": _words,
}
