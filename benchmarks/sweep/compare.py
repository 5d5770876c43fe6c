"""Is a distributed result the one-card result? Structure, shape, dtype, value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

# Relative; half precision is compared as single.
TOLERANCE = {torch.float32: 2e-4, torch.complex64: 2e-4, torch.float64: 1e-7, torch.complex128: 1e-7}


def leaves_of(value: Any) -> tuple[list[Any], str]:
    leaves, spec = tree_flatten(value)
    return leaves, str(spec)


def difference(got: Any, expected: Any, values: bool = True) -> str:
    """Why a result (gathered already) is not the expected one; "" if it is."""
    mine, my_structure = leaves_of(got)
    theirs, structure = leaves_of(expected)
    if len(mine) != len(theirs) or my_structure != structure:
        return f"structure {my_structure}, expected {structure}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        why = _leaf(a, b, values)
        if why:
            return f"result {i}: {why}" if len(mine) > 1 else why
    return ""


def _leaf(a: Any, b: Any, values: bool) -> str:
    if not isinstance(b, Tensor):
        alike = type(a) is type(b) and (not values or a == b or (a != a and b != b))
        if isinstance(b, float) and type(a) is float:
            alike = not values or abs(a - b) <= 2e-4 * (1 + abs(b)) or a == b or (a != a and b != b)
        return "" if alike else f"{a!r}, expected {b!r}"
    if not isinstance(a, Tensor):
        return f"a {type(a).__name__}, expected a tensor"
    if a.shape != b.shape:
        return f"shape {list(a.shape)}, expected {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype}, expected {b.dtype}"
    if not values or not b.numel() or b.layout is not torch.strided:
        return ""
    return _values(a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg())


def _values(a: Tensor, b: Tensor) -> str:
    if b.element_size() < (8 if b.is_complex() else 4) and (b.is_floating_point() or b.is_complex()):
        wide = torch.complex64 if b.is_complex() else torch.float32
        return _values(a.to(wide), b.to(wide))
    tolerance = TOLERANCE.get(b.dtype)
    if tolerance is None:
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {b.numel()} values differ"
    finite = b.isfinite()
    scale = b[finite].abs().mean().item() if finite.any() else 0.0
    close = torch.isclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 0.1), equal_nan=True)
    if bool(close.all()):
        return ""
    worst = (a - b)[~close].abs().max().item()
    return f"{int((~close).sum())} of {b.numel()} values differ, by up to {worst:.3g}"
