"""Operators that work on each element alone, with numpy's broadcasting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature
from onecard.rules.table._share import widens

aten = torch.ops.aten


EACH = "...* -> ...*"  # all operands and results share their dims


# ---- Nothing pending may enter

_ONE = """
    abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac frexp i0 lgamma
    log log10 log1p log2 logit mvlgamma nan_to_num polygamma reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh
    sqrt tan tanh trunc isinf isnan isposinf isneginf logical_not bitwise_not angle"""
_TWO = """
    atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign eq floor_divide fmax fmin fmod
    gcd ge gt heaviside hypot igamma igammac lcm le logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum
    minimum ne nextafter polar pow remainder xlogy __lshift__ __rshift__ __iand__ __ior__ __ixor__"""
_THREE = "clamp clamp_max clamp_min threshold"
_ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish relu silu softplus
    softshrink _prelu_kernel"""
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w entr erfcx hermite_polynomial_h hermite_polynomial_he i0e i1 i1e laguerre_polynomial_l
    legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtri
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta"""

for _names in (_ONE, _TWO, _THREE, "special_" + " special_".join(_SPECIAL.split())):
    row(_names, EACH)


def _sampler_gradient(call: Call) -> list[Tensor]:
    """PyTorch has no meta functions for these."""
    return [torch.empty_like(torch.broadcast_tensors(*call.operands)[0])]


row("_standard_gamma_grad _dirichlet_grad", EACH, results=_sampler_gradient)


def _full_buffer(c: Local) -> None:
    """CUDA's log_sigmoid leaves its buffer empty, the meta function says otherwise; nobody reads it there."""

    def run(x: Tensor, *rest: Any) -> Any:
        output, buffer = aten.log_sigmoid_forward(x, *rest)
        return output, buffer if buffer.shape == x.shape else torch.empty_like(x)

    if c.call.schema.name == "log_sigmoid_forward":
        c.run = run


row(_ACTIVATIONS, EACH, local=_full_buffer, positions="", any_rows=True)


# ---- Linear in something


@row("add sub rsub")
def _add(call: Call) -> Form:
    """A number is no operand: every rank would add it, so then nothing may be pending."""
    return Form(EACH, linear="self + other" if len(call.operands) == 2 else "")


@row("mul")
def _mul(call: Call) -> Form:
    sums = [name for name, x in zip(("self", "other"), call.operands, strict=False) if not _becomes_fraction(call, x)]
    return Form(EACH, linear=" * ".join(sums))


@row("div")
def _div(call: Call) -> Form:
    rounds = call.values.get("rounding_mode") is not None
    return Form(EACH, linear="" if rounds or _becomes_fraction(call, call.self) else "self")


def _becomes_fraction(call: Call, x: Tensor) -> bool:
    """Whether whole numbers become fractions: they are added up before: parts of a count that are rounded add up to none."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return False
    made = call.results or call.operands  # a call that is only asked for how it goes has no results yet
    return any(t.dtype.is_floating_point or t.dtype.is_complex for t in made)


row("ldexp", "..., ... -> ...", linear="self")
row("where.self", "..., ..., ... -> ...", linear="self + other")
row("lerp", EACH, linear="self + end")
row("addcmul", "..., ..., ... -> ...", linear="self + tensor1 * tensor2")
row("addcdiv", "..., ..., ... -> ...", linear="self + tensor1")
row("complex", "..., ... -> ...", linear="real + imag")
row("neg deg2rad rad2deg _conj_physical conj_physical", "... -> ...", linear="self")

# Backward operators are linear in the gradient, which therefore may stay pending.
_BACKWARD = """
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward logit_backward mish_backward _prelu_kernel_backward rrelu_with_noise_backward sigmoid_backward
    silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward"""


row(_BACKWARD, EACH, linear="grad_output")
row("hardshrink_backward", "..., ... -> ...", linear="grad_out")

# The dim is cut into halves, so it stays whole.
row("glu", "... dim:_ -> ... dim:_")
row("glu_backward", "... dim:_, ... dim:_ -> ... dim:_", linear="grad_output")

# ---- Copies

row("clone detach alias lift lift_fresh", "... -> ...", moves=True)
row("zero", "... -> ...", moves=True)  # of zeros every reduction makes zero


def _physical_conj(c: Local) -> None:
    """Collectives send memory as it is, so a local tensor must not be conjugated by a mere flag."""
    c.run, c.copies = torch.conj_physical, True


row("_conj", "... -> ...", linear="self", local=_physical_conj, positions="")


@row("_to_copy")
def _to_copy(call: Call) -> Form:
    """Rounding each summand is not rounding their sum, so a pending tensor may only become wider."""
    return Form("... -> ...", moves=widens(call.self.dtype, call.results[0].dtype))


@row("copy")
def _copy(call: Call) -> Form:
    return Form(EACH, moves=len(call.operands) == 2 and widens(call.src.dtype, call.self.dtype))


@row("fill")
def _fill(call: Call) -> Form:
    unread = "" if call.schema.written else "self"  # a tensor that is written keeps its layout, so it is looked at
    return Form(EACH, unread=unread, linear="value" if unread and len(call.operands) == 2 else "")


# ---- Elements against a list

row("bucketize.Tensor", "..., _ -> ...")


@row("isin.Tensor_Tensor")
def _isin(call: Call) -> str:
    return signature([names(call.elements.dim()), ["_"] * call.test_elements.dim()], [names(call.elements.dim())])
