"""Operators that work on each element alone: of most of them the calls follow from their rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onecard.rules.registry import rows
from onecard.rules.rule import Form
from onecard.rules.samples.data import inside, integers, mask, positive, real, whole
from onecard.rules.table import families

aten = torch.ops.aten

# One operand; two that broadcast in every way: equal shapes, a missing dim, a dim of size one on either side, a scalar; a number.
_CALLS = (((4, 3),), ((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 1), (1, 3)), ((5, 4), ()), ((4, 3), None))
_EACH = ("...* -> ...*", "... -> ...", "..., ... -> ...")
_BY_FUNCTION = ("add", "sub", "rsub", "div")  # rows whose function tells numbers from tensors


def _derived() -> Iterator[Callable[[], Any]]:
    """Calls of all operators whose row says no more than that each element is for itself."""
    for name in families["pointwise"]:
        form, packet = rows[name].form, getattr(aten, name, None)
        plain = isinstance(form, Form) and form.text in _EACH and "backward" not in name and not name.startswith("__i")
        if packet is None or not (plain or name in _BY_FUNCTION):
            continue
        views = isinstance(form, Form) and form.moves  # of a leaf that requires a gradient it would be no leaf
        for shapes, (sets, number) in product(_CALLS, _NUMBERS):
            fit = (sets[3:] or sets) if views else sets
            programs = (_program(packet, make, number, shapes) for make in fit if _takes(packet, shapes))
            yield from islice(filter(_finite, programs), 1)


def _takes(packet: Any, shapes: Any) -> bool:
    """Whether some overload is for so many tensors (a number stands for the last one), and needs no more."""
    forms = [getattr(packet, overload)._schema.arguments for overload in packet.overloads()]
    types = [[str(a.type) for a in form if not a.has_default_value()] for form in forms]
    kinds = ["number" if shape is None else "Tensor" for shape in shapes]
    return kinds in types or (kinds[-1] == "number" and ["Tensor", "Tensor"] in types)


def _program(op: Any, make: Callable[..., Tensor], number: float, shapes: Any) -> Callable[[], Any]:
    return lambda: op(*(number if shape is None else make(*shape) for shape in shapes))


def _fresh(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *shape: make(*shape, grad=False)


# Floating-point numbers from all to few, then integers: of each kind the first on which an operator is finite.
_NUMBERS = (
    ((real, inside, positive, *map(_fresh, (real, inside, positive))), 2.5),
    ((lambda *shape: integers(5, *shape, low=1),), 2),
)


def _finite(program: Callable[[], Any]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = program()
    except (RuntimeError, TypeError):  # not for these numbers, or not for so many
        return False
    return all(bool(t.isfinite().all()) for t in (made if isinstance(made, tuple) else (made,)))


SAMPLES = [
    *_derived(),
    *(
        lambda op=getattr(aten, name): op(inside(4, 3, grad=False), integers(4, 3))
        for name in families["pointwise"]
        if "polynomial" in name
    ),
    lambda: positive(4, 3).acosh(),
    lambda: aten.special_zeta(positive(4, 3, grad=False) + 1, positive(3, grad=False)),
    lambda: aten._standard_gamma_grad(positive(4, 3, grad=False), positive(4, 3, grad=False)),
    lambda: aten._dirichlet_grad(
        inside(4, 3, grad=False), positive(4, 3, grad=False), positive(4, 1, grad=False).expand(4, 3)
    ),
    lambda: 1.0 - real(4, 3),
    lambda: real(4, 3) / 2.0,
    lambda: torch.polygamma(1, positive(4, 3)),
    lambda: aten.mvlgamma(positive(4, 3) + 2, 2),
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
