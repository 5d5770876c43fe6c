"""Seeing an operator before torch does: composite operators, whole, where a DistTensor is among the operands.

A tensor subclass sees what is left after autograd. Operators that torch defines by other operators ("composite" ones) are
taken apart above that, in C++, and some of them touch memory while they are, which a wrapper does not have. Therefore every
DistTensor carries one more dispatch key, one that comes before autograd's. For all operators it is passed over, at no cost;
``intercept`` puts a function there. Calls on plain tensors alone never come through here.

The key is the one that torch keeps for libraries outside its own tree ("DeferredInit", above autograd and autocast, with no
kernel of torch's own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onecard._torch import names as _torch
from onecard._torch.names import DispatchKey, DispatchKeySet, OpOverload

_NAME = "DeferredInit"
KEY = _torch.dispatch_key(_NAME)
KEYS = DispatchKeySet(KEY)  # what a DistTensor carries
DISPATCH = DispatchKeySet(DispatchKey.Python)  # straight to DistTensor.__torch_dispatch__

_all = torch.library.Library("_", "IMPL")
_all.fallback(torch.library.fallthrough_kernel, _NAME)
_aten = torch.library.Library("aten", "IMPL")


def intercept(op: OpOverload, kernel: Callable[..., Any]) -> None:
    """Run an ATen operator by ``kernel(keyset, *args, **kwargs)`` wherever a DistTensor is among its operands."""
    name = op._schema.name.removeprefix("aten::")
    overload = op._schema.overload_name
    _aten.impl(f"{name}.{overload}" if overload else name, kernel, _NAME, with_keyset=True)


def onward(op: OpOverload, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """What would have run without the interception."""
    return op.redispatch(keyset.remove(KEY), *args, **kwargs)
