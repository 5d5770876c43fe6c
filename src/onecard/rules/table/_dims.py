"""Small words for rules that depend on the number of dims: lists of factor names in, a rule's text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Dims = Sequence[str]


def names(count: int, prefix: str = "d") -> list[str]:
    """Factor names, one for each dim.

    Example:
        >>> names(3)
        ['d0', 'd1', 'd2']
    """
    return [f"{prefix}{i}" for i in range(count)]


def term(dims: Dims) -> str:
    """One operand's or result's term; a scalar is written "()"."""
    return " ".join(dims) or "()"


def signature(operands: Iterable[Dims], results: Iterable[Dims]) -> str:
    """The text of a rule.

    Example:
        >>> signature([["a", "b"], []], [["a"]])
        'a b, () -> a'
    """
    return f"{', '.join(map(term, operands))} -> {', '.join(map(term, results))}"


def with_whole(dims: Dims, whole: Iterable[int]) -> list[str]:
    """The dims with some of them never cut."""
    stay = set(whole)
    return ["_" if d in stay else name for d, name in enumerate(dims)]


def last(count: int, ndim: int) -> range:
    """The numbers of the last dims."""
    return range(ndim - count, ndim)


def can_sum(tensor: Tensor) -> bool:
    """Whether a sum to which all ranks but one give zero can put the value together (bool and float8 have no sum)."""
    return tensor.dtype is not torch.bool and not (tensor.is_floating_point() and tensor.element_size() == 1)
