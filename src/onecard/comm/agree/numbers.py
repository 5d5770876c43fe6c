"""Numbers of Python that ranks compare: which values are any, and when two are one. Pure."""

from __future__ import annotations

import math
from typing import Any

_CLOSE = 1e-6
"""Of two numbers that processors may round otherwise."""


def is_number(value: Any) -> bool:
    """Whether a value is one, or a list of them; truth values are none.

    Example:
        >>> [is_number(x) for x in (1, 0.5, [1, 0.5], True, [], [True], "1", None)]
        [True, True, True, False, False, False, False, False]
    """
    if type(value) in (list, tuple):
        return bool(value) and all(map(is_number, value))
    return type(value) in (int, float)


def alike(a: Any, b: Any) -> bool:
    """Whether two values of ranks, as JSON gives them back, are one.

    Example:
        >>> alike([0.9, 0.1], [0.9, 0.1 + 1e-9]), alike(5, 6), alike(float("nan"), float("nan")), alike("a", 1)
        (True, False, True, False)
    """
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return a == b or math.isclose(a, b, rel_tol=_CLOSE) or (a != a and b != b)
    return bool(a == b)
