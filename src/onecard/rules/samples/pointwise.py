"""Operators that work on each element alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onecard.rules.samples.data import inside, integers, mask, positive, real, whole

aten = torch.ops.aten

# Two operands that broadcast in every way: equal shapes, a missing dim, a dim of size one on either side, a scalar.
_PAIRS = (((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 1), (1, 3)), ((5, 4), ()))

_REAL = """
    abs atan ceil cos deg2rad erf erfc exp exp2 expm1 floor frac i0 isinf isnan isneginf isposinf nan_to_num neg
    rad2deg relu round sgn sigmoid sign signbit sin sinc sinh cosh asinh tan tanh trunc logical_not angle
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu silu softplus softshrink
    log_sigmoid_forward clone detach alias frexp"""
_INSIDE = "acos asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt"
_BINARY_REAL = """
    add sub rsub mul div atan2 copysign eq ne lt le gt ge fmax fmin fmod hypot logaddexp logaddexp2 maximum
    minimum nextafter remainder logical_and logical_or logical_xor"""
_BINARY_POSITIVE = "igamma igammac pow xlogy special_xlog1py polar complex"
_BINARY_INTEGER = """
    add sub mul div bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm __lshift__
    __rshift__ floor_divide remainder maximum eq"""
_WITH_NUMBER = "add sub rsub mul div pow eq ne lt le gt ge fmod remainder clamp_min clamp_max"
_SPECIAL_ONE = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 ndtri scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"""
_SPECIAL_TWO = """
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"""


def _calls(names: str, *arguments: Callable[[], Any], prefix: str = "") -> list[Callable[[], Any]]:
    return [
        lambda op=getattr(aten, prefix + name): op(*(argument() for argument in arguments)) for name in names.split()
    ]


def _pairs(names: str, make: Callable[..., Any]) -> list[Callable[[], Any]]:
    made = []
    for name in names.split():
        op = getattr(aten, name)
        made += [lambda op=op, a=a, b=b: op(make(*a), make(*b)) for a, b in _PAIRS]
    return made


def _ints(*shape: int) -> torch.Tensor:
    return integers(5, *shape, low=1)


SAMPLES = [
    *_calls(_REAL, lambda: real(4, 3)),
    *_calls(_INSIDE, lambda: inside(4, 3)),
    *_calls(_SPECIAL_ONE, lambda: inside(4, 3, grad=False), prefix="special_"),
    *_calls(_SPECIAL_TWO, lambda: inside(4, 3, grad=False), lambda: integers(4, 3), prefix="special_"),
    *_pairs(_BINARY_REAL, real),
    *_pairs(_BINARY_POSITIVE, lambda *shape: positive(*shape, grad=False)),
    *_pairs("heaviside floor_divide", lambda *shape: real(*shape, grad=False)),
    *_pairs("pow xlogy", positive),
    *_pairs(_BINARY_INTEGER, _ints),
    *_calls(_WITH_NUMBER, lambda: real(4, 3), lambda: 2.5),
    *_calls(_WITH_NUMBER, lambda: integers(7, 4, 3), lambda: 2),
    lambda: positive(4, 3).acosh(),
    lambda: aten.special_zeta(positive(4, 3, grad=False) + 1, positive(3, grad=False)),
    lambda: aten._standard_gamma_grad(positive(4, 3, grad=False), positive(4, 3, grad=False)),
    lambda: aten._dirichlet_grad(
        inside(4, 3, grad=False), positive(4, 3, grad=False), positive(4, 1, grad=False).expand(4, 3)
    ),
    lambda: torch.polygamma(1, positive(4, 3)),
    lambda: aten.mvlgamma(positive(4, 3) + 2, 2),
    lambda: integers(9, 4, 3).bitwise_not(),
    lambda: 1.0 - real(4, 3),
    lambda: real(4, 3) / 2.0,
    lambda: aten.div(real(4, 3), positive(3), rounding_mode="floor"),
    lambda: aten.div(real(4, 3), 2.0, rounding_mode="trunc"),
    lambda: torch.add(real(4, 3), real(3), alpha=2.5),
    lambda: torch.sub(real(4, 3), real(3), alpha=2.5),
    lambda: real(4, 3).clamp(-0.5, 0.5),
    lambda: torch.clamp(real(4, 3), real(3), None),
    lambda: F.threshold(real(4, 3), 0.1, 2.0),
    lambda: torch.where(mask(4, 3), real(4, 1), real(3)),
    lambda: torch.where(mask(4, 1), real(4, 3), 0.5),
    lambda: torch.lerp(real(4, 3), real(4, 3), 0.3),
    lambda: torch.lerp(real(4, 3), real(3), inside(4, 1)),
    lambda: torch.addcmul(real(4, 3), real(4, 1), real(3), value=0.5),
    lambda: torch.addcdiv(real(4, 3), real(4, 1), positive(3), value=0.5),
    lambda: real(4, 3).masked_fill(mask(4, 3), 0.0),
    lambda: real(4, 3).masked_fill(mask(3), -2.5),
    lambda: aten.masked_fill(real(4, 3, grad=False), mask(4, 1), real(grad=False)),
    lambda: F.prelu(real(2, 3, 4), real(3)),
    lambda: F.glu(real(3, 4, 5), 1),
    lambda: F.gelu(real(4, 3), approximate="tanh"),
    lambda: aten.rrelu_with_noise_backward(real(4, 3), real(4, 3), inside(4, 3, grad=False), 0.1, 0.3, True, False),
    lambda: aten.softplus(real(4, 3), 2.0, 1.0),
    lambda: aten._to_copy(real(4, 3, grad=False), dtype=torch.float32),
    lambda: integers(9, 4, 3, dtype=torch.int32).long(),
    lambda: real(4, 3, dtype=torch.float32).double(),
    lambda: real(4, 3, grad=False, dtype=torch.bfloat16).float(),
    lambda: real(4, 3).long(),
    lambda: mask(4, 3).to(torch.uint8),
    lambda: aten.copy(real(4, 3, grad=False), real(3, grad=False)),
    lambda: real(4, 3, grad=False).copy_(real(4, 3, grad=False)),
    lambda: integers(9, 4, 3).copy_(integers(9, 3, dtype=torch.int32)),
    lambda: real(4, 3, grad=False, dtype=torch.float32).copy_(real(4, 1, grad=False)),
    lambda: real(4, 3, grad=False).fill_(2.0),
    lambda: aten.fill(real(4, 3, grad=False), 2.0),
    lambda: aten.fill(real(4, 3, grad=False), real(grad=False)),
    lambda: real(4, 3, grad=False).zero_(),
    lambda: real(4, 3, grad=False).add_(real(3, grad=False)),
    lambda: real(4, 3, grad=False).mul_(2.0),
    lambda: real(4, 3, grad=False).addcdiv_(real(4, 3, grad=False), positive(3, grad=False)),
    lambda: real(4, 3, grad=False).lerp_(real(4, 3, grad=False), 0.1),
    lambda: real(4, 3, grad=False).relu_(),
    lambda: aten.lift(real(4, 3, grad=False)),
    lambda: aten.lift_fresh(real(4, 3, grad=False)),
    lambda: torch.complex(real(4, 3), real(4, 3)).conj_physical().abs(),
    lambda: aten._conj(torch.complex(real(4, 3, grad=False), real(4, 3, grad=False))),
    lambda: torch.bucketize(real(4, 3), torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)),
    lambda: torch.isin(integers(5, 4, 3), integers(5, 2, 2)),
    lambda: real(1, 5) * real(5, 1),
    lambda: torch.complex(real(4, 3, grad=False), real(4, 3, grad=False)).conj_physical_(),
    lambda: real(4, 3, grad=False).ldexp_(integers(4, 3)),
    *(lambda op=op: whole(op.Tensor, mask(4, 3), mask(3)) for op in (aten.__iand__, aten.__ior__, aten.__ixor__)),
]
