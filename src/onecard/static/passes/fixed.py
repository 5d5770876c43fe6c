"""``ones_like`` and its kin, which look at a shape only -> ``full``: so they wait for nothing, and keep nothing alive.

What then depends on no input at all is computed once, when the recording is made into a function (``compiled.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from onecard.static.passes.draft import editing, exchanged
from onecard.static.step.order import name_of

aten = torch.ops.aten
_VALUES = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}


@editing
def of_no_input(graph: fx.Graph) -> bool:
    """Only contiguous ones: others take their strides from the tensor that they are like."""
    found = {n: call for n in graph.nodes if (call := _full(n)) is not None}
    for node, call in found.items():
        exchanged(node, aten.full.default, *call)
    return bool(found)


def _full(node: fx.Node) -> tuple[Any, Any] | None:
    """The arguments of ``full`` that give the same; None of another operator."""
    if "tensor" not in node.meta or (name := name_of(node)) not in _VALUES:
        return None
    shape, stride, dtype, device = node.meta["tensor"]
    if not contiguous(shape, stride) or dtype.is_complex or node.kwargs.get("pin_memory"):
        return None
    value = bool(_VALUES[name]) if dtype is torch.bool else _VALUES[name]
    return (list(shape), value), {"dtype": dtype, "device": device}


def contiguous(shape: Any, stride: Any) -> bool:
    """Whether strides are those of a contiguous tensor, without overlap.

    Example:
        >>> contiguous((2, 3), (3, 1)), contiguous((2, 3), (0, 1)), contiguous((1, 3), (7, 1))
        (True, False, True)
    """
    if 0 in shape:
        return True
    return all(n == 1 or s == math.prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, stride, strict=True)))
