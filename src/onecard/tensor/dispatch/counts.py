"""Counts of which ranks hold summands are added up before they are divided: parts that are rounded each add up to no count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from onecard._torch import names as _torch
from onecard.tensor.dist_tensor import DistTensor

_FEW = 1 << 16


def added_up(x: Any) -> Any:
    """A few numbers outside autograd of which ranks hold summands, whole; anything else as it is.

    A count of tokens is a whole number, and one card divides it once. ``sign(counts.mean() - counts)`` of quotients that each
    rank has rounded is another one where an expert has as many as the mean. One number is let be, as a loss that is added up for
    a log; of whole numbers in an integer dtype the rules of ``div`` and ``mul`` see to it.
    """
    if not isinstance(x, DistTensor) or not x._spec.layout.pending or not x.is_floating_point() or x.requires_grad:
        return x
    if not x.dim() or x.numel() > _FEW or _torch.graph_task() >= 0:
        return x
    return x.redistribute(x._spec.layout.reduced().placements)


def _divides(name: str) -> Callable[..., Any]:
    torchs = getattr(Tensor, name)

    def divide(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torchs(added_up(self), *args, **kwargs)

    divide.__name__, divide.__doc__ = name, torchs.__doc__
    return divide


for _name in ("__truediv__", "div", "divide", "true_divide"):
    setattr(DistTensor, _name, _divides(_name))
