"""Comparison of a distributed value with its one-card twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float | None = None) -> None:
    """Checks that `actual` has the values of `expected`; raises AssertionError naming the first difference.

    Both are tensors (a distributed one is gathered with its `full_tensor()`, so every rank must call), arrays or
    numbers, or lists, tuples and dicts of them. Shapes and dtypes must be equal, integers exactly equal, NaN where
    NaN is expected. Floats may differ by `atol + rtol * |expected|`; by default `atol` is `rtol` times the mean of
    `|expected|`, because what rounding leaves of a value near zero is relative to its neighbours.

    >>> assert_close(torch.tensor([1.0, 2.000001]), torch.tensor([1.0, 2.0]))
    >>> assert_close(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
        ...
    AssertionError: value differs first at [1]: 2.0999999046325684, expected 2.0 (1 of 2 elements differ;
    largest difference 0.1, allowed about 3e-05)
    """
    __tracebackhide__ = True
    _compare(actual, expected, rtol, atol, "value")


def _compare(actual: Any, expected: Any, rtol: float, atol: float | None, name: str) -> None:
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        _require(isinstance(actual, Mapping), f"{name} is a {type(actual).__name__}, expected a mapping")
        _require(actual.keys() == expected.keys(), f"{name} has keys {list(actual)}, expected {list(expected)}")
        for key in expected:
            _compare(actual[key], expected[key], rtol, atol, f"{name}[{key!r}]")
    elif isinstance(expected, list | tuple):
        _require(isinstance(actual, list | tuple), f"{name} is a {type(actual).__name__}, expected a sequence")
        _require(len(actual) == len(expected), f"{name} has length {len(actual)}, expected {len(expected)}")
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            _compare(left, right, rtol, atol, f"{name}[{index}]")
    elif actual is None or expected is None:
        _require(actual is expected, f"{name} is {actual!r}, expected {expected!r}")
    else:
        _compare_tensors(_plain(actual), _plain(expected), rtol, atol, name)


def _plain(value: Any) -> torch.Tensor:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.as_tensor(whole).detach().cpu()


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float | None, name: str) -> None:
    __tracebackhide__ = True
    _require(actual.shape == expected.shape, f"{name} has shape {(*actual.shape,)}, expected {(*expected.shape,)}")
    _require(actual.dtype == expected.dtype, f"{name} has dtype {actual.dtype}, expected {expected.dtype}")
    if not (actual.is_floating_point() or actual.is_complex()):
        wrong, allowed = actual != expected, "none"
    else:
        # Compared in the widest type: a rounding of the comparison itself must not count.
        wide = torch.complex128 if actual.is_complex() else torch.float64
        actual, expected = actual.to(wide), expected.to(wide)
        finite = expected.isfinite()
        scale = expected[finite].abs().mean().item() if finite.any() else 0.0
        floor = rtol * scale if atol is None else atol
        wrong = ~torch.isclose(actual, expected, rtol=rtol, atol=floor, equal_nan=True)
        allowed = f"about {floor + rtol * scale:.2g}"
    if wrong.any():
        raise AssertionError(_first_difference(actual, expected, wrong, allowed, name))


def _first_difference(
    actual: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, allowed: str, name: str
) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    place = f"differs first at {list(index)}: " if index else "is "
    wide = torch.complex128 if actual.is_complex() else torch.float64
    largest = (actual[wrong].to(wide) - expected[wrong].to(wide)).abs().max().item()
    return (
        f"{name} {place}{actual[index].item()}, expected {expected[index].item()} ({int(wrong.sum())} of "
        f"{wrong.numel()} elements differ; largest difference {largest:.2g}, allowed {allowed})"
    )


def _require(condition: bool, message: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(message)
