"""Operators that give Python values, or ask about the tensor itself: they need no rule."""

from __future__ import annotations

from typing import Any

import torch

from onecard.errors import DispatchError
from onecard.tensor.convert import whole_on_mesh
from onecard.tensor.dispatch import handle
from onecard.tensor.dist_tensor import describe
from onecard.tensor.program import check_writable

aten = torch.ops.aten


def _scalar(func: Any, args: Any, kwargs: Any) -> Any:
    """item(): the value on every rank of the mesh."""
    x = args[0]
    if not x._spec.here:
        raise DispatchError(
            f".item() (or bool(), float()) of {describe(x)}: this rank is not in {x.mesh!r}, so it does not hold the value"
        )
    return func(whole_on_mesh(x, "item"))


def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0].shape == args[1].shape


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    a, b = args
    return a.shape == b.shape and bool((a == b).all())


def _pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0]._local.is_pinned()


def _eye(func: Any, args: Any, kwargs: Any) -> Any:
    """eye(n, m, out=x), as torch.nn.init.eye_ calls it: each rank writes its part."""
    out, size = kwargs["out"], torch.Size([args[0], args[-1]])
    check_writable(out, "eye")
    if out.shape != size:
        raise DispatchError(f"{func}: out= is {describe(out)}, the result is {list(size)}; make them alike")
    out.settle()
    if out._spec.here:
        rows, columns = (torch.arange(s.start, s.stop) for s in out._spec.layout.local_slices(size))
        out._local.copy_(rows[:, None] == columns)
    return out


handle(aten.eye.out, _eye)
handle(aten.eye.m_out, _eye)
handle(aten._local_scalar_dense.default, _scalar)
handle(aten.is_same_size.default, _same_size)
handle(aten.equal.default, _equal)
handle(aten.is_pinned.default, _pinned)
