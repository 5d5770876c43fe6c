"""The same program in float64: rounding is then a million times smaller, and a fault is as large as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from onecard._torch import fakes, names
from onecard._torch.names import tree_leaves, tree_map
from onecard.tensor.dist_tensor import DistTensor

_NARROW = {torch.float32, torch.bfloat16, torch.float16}
_CASTS = {Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double}

SCALING = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
"""Kernels of a ``GradScaler``, which want the scale in float32 whatever the gradients are."""
_UNSCALES = ("grad_scale", "found_inf")
"""What fused optimizers are given by it, likewise."""


class Wide(TorchFunctionMode):
    """Inside, each narrower floating dtype that a program names is float64, and what it makes of no tensor, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.grad:  # torch names what it reads, and so the patched property
            func = names.gradient if func.__name__ == "__get__" else names.set_gradient
        func, kwargs = _CASTS.get(func, func), kwargs or {}
        if torch.dtype in map(type, args):
            args = tuple(map(widened, args))
        if torch.dtype in map(type, kwargs.values()):
            kwargs = {name: widened(x) for name, x in kwargs.items()}
        if getattr(func, "__name__", "") in SCALING:
            return scaled(func, args, kwargs)
        kwargs = unscaling(kwargs)
        result = func(*args, **kwargs)
        narrow = type(result) is Tensor and result.dtype in _NARROW
        if narrow and not any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs))):
            return wide(result)
        return result


def scaled(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a kernel of a ``GradScaler`` with its scales in float32, and put back what it writes to them."""
    given = [x.float() if isinstance(x, Tensor) and x.dtype is torch.float64 else x for x in args]
    result = func(*given, **kwargs)
    with torch.no_grad():
        for mine, x in zip(args, given, strict=True):
            if isinstance(mine, Tensor) and mine is not x:
                mine.copy_(x)
    return args[0] if isinstance(result, Tensor) else result


def unscaling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a fused optimizer's kernel with a scaler's scale in float32; of others as they are."""
    given = {name: kwargs[name].float() for name in _UNSCALES if isinstance(kwargs.get(name), Tensor)}
    return kwargs | given if given else kwargs


def widened(given: Any) -> Any:
    """A dtype that is asked for: of narrower floats float64; all else as it is."""
    return torch.float64 if isinstance(given, torch.dtype) and given in _NARROW else given


def wide(x: Any) -> Any:
    """A value in float64, if it is a narrower float; modules and the states of optimizers in place."""
    if isinstance(x, nn.Module):
        return x.double()
    if isinstance(x, Optimizer):
        for state in x.state.values():
            state |= {key: wide(value) for key, value in state.items()}
        return x
    if isinstance(x, Tensor) and x.dtype in _NARROW and not isinstance(x, DistTensor) and not fakes.is_fake(x):
        made = x.detach().double()
        return made.requires_grad_(x.requires_grad) if not isinstance(x, nn.Parameter) else nn.Parameter(made)
    return x


def copied(args: Any, in_float64: bool) -> Any:
    """A program's arguments for one rank, as its own: what is shared among them stays so."""
    made = copy.deepcopy(args)
    return tree_map(wide, made) if in_float64 else made


@contextmanager
def float64() -> Iterator[None]:
    """Inside, on this thread and all others, what is made without a dtype is float64, and autocast is off."""
    before = torch.get_default_dtype()
    begin = torch.autocast.__init__

    def off(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, device_type, enabled=False)

    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.autocast, "__init__", off):
            yield
    finally:
        torch.set_default_dtype(before)


_BITS = {31: 63, 2**31 - 1: 2**63 - 1}
"""Numbers of an operator on a float's 32 bits, and those of 64."""


def wide_bits(given: Any) -> Any:
    """What an operator is given that looks at a float's bits, as a maximum over ranks does: for a float that is wide now.

    Example:
        >>> wide_bits((torch.int32, 31, 7))
        (torch.int64, 63, 7)
    """
    return tree_map(lambda x: torch.int64 if x is torch.int32 else _BITS.get(x, x) if isinstance(x, int) else x, given)
