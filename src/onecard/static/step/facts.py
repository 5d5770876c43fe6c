"""What is asked of a tensor while a step is recorded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from onecard._torch.fakes import device_of


def takes_gradients(x: Tensor) -> bool:
    """Whether a tensor is a leaf that has gradients."""
    if is_lazy(x):  # somewhere in the process: nothing to be asked yet
        return False
    try:
        # Asked whether it is a leaf, a view that was written to under no_grad takes its view anew and keeps what comes out: below
        # autograd, that it has no gradient.
        if not x.requires_grad or (x._is_view() and x._base is not None and x._base.requires_grad):
            return False
        return x.is_leaf
    except (
        RuntimeError,
        AssertionError,
    ):  # a view that autograd has given up, or without data, somewhere in the process
        return False


def facts(x: Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device of a tensor."""
    return (tuple(x.shape), tuple(x.stride()), x.dtype, device_of(x))


def as_the_kernel_gives(args: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results without data; of those that a mask among the arguments does not want, kernels make none."""
    masks = (a for a in args if isinstance(a, list) and len(a) == len(result) and all(type(w) is bool for w in a))
    mask = next(masks, None)
    return result if mask is None else tuple(x if wanted else None for x, wanted in zip(result, mask, strict=True))
