"""Rounding told from faults: what is wrong in float32 and right in float64, to a hundredth of what was asked, is rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onecard.testing import run_ranks

FINER = 0.01  # of the tolerance: what float64 rounds is a millionth of what float32 does


@contextmanager
def width(wide: bool) -> Iterator[float]:
    """The dtype that parameters get; gives what the tolerance is multiplied with."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    try:
        yield FINER if wide else 1.0
    finally:
        torch.set_default_dtype(before)


def is_rounding(program: Callable[..., Any], ranks: int, *args: Any) -> bool:
    """Whether a program that failed is right in float64: ``args`` are those that say so."""
    try:
        found = run_ranks(program, ranks, *args, timeout=120)
    except Exception:
        return False
    return not any(found)
