"""Operators that give Python values, or ask about the tensor itself: they need no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onecard._torch import names as _torch
from onecard._torch.names import DispatchKey
from onecard.comm.issue import groups
from onecard.comm.world.world import get_rank
from onecard.errors import DispatchError
from onecard.place.layout import Layout
from onecard.tensor.aliasing import memory
from onecard.tensor.dispatch.entries import handler
from onecard.tensor.dist_tensor import DistTensor, describe, wrap, wrap_view
from onecard.tensor.moves import whole_everywhere, whole_on_mesh
from onecard.tensor.spec import Spec

aten = torch.ops.aten
_included = _torch.SetExcluded


_LOOKS = ". torch.distributions look at their arguments unless they are given validate_args=False"


@handler(aten._local_scalar_dense.default)
def _scalar(func: Any, args: Any, kwargs: Any) -> Any:
    """item(): the value on every rank of the mesh; of a stage's, on every rank."""
    x = args[0]
    if x.mesh in groups.stages.here:
        return func(whole_everywhere(x, "item"))
    if not x._spec.here:
        raise DispatchError(
            f".item() (or bool(), float(), torch.equal) of {describe(x)}: rank {get_rank()} is not in {x.mesh!r}, so it "
            "does not hold the value. Every rank of the world can have it sent: x.full_tensor().item(), called on all of them"
            + (_LOOKS if x.dtype is torch.bool else "")
        )
    return func(whole_on_mesh(x, "item"))


def _number(name: str) -> Callable[[DistTensor], Any]:
    """``float(x)`` and its kin. ``torch.tensor([loss, ...])`` calls them with Python's dispatch switched off: on again."""
    ordinary = getattr(torch.Tensor, name)

    def read(x: DistTensor) -> Any:
        with _included(DispatchKey.PythonTLSSnapshot, False), _included(DispatchKey.Python, False):
            return ordinary(x)

    return read


@handler(aten.is_same_size.default)
def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0].shape == args[1].shape


@handler(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    a, b = args
    return a.shape == b.shape and _scalar(aten._local_scalar_dense.default, [(a == b).all()], {})


@handler(aten.allclose.default)
def _allclose(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


@handler(aten._linalg_check_errors.default)
def _check_errors(func: Any, args: Any, kwargs: Any) -> None:
    """A matrix that has no inverse is an error on every rank, not only on the one that has it."""
    info = args[0]
    if info._spec.here:
        func(whole_on_mesh(info, "_linalg_check_errors"), *args[1:], **kwargs)


@handler(aten.is_set_to.default)
def _is_set_to(func: Any, args: Any, kwargs: Any) -> bool:
    a, b = args
    if not (isinstance(a, DistTensor) and isinstance(b, DistTensor)):
        return False
    same = a._spec.layout is b._spec.layout and a.shape == b.shape and a.stride() == b.stride()
    return same and a._local.is_set_to(b._local)


@handler(aten._has_same_storage_numel.default)
def _same_storage_size(func: Any, args: Any, kwargs: Any) -> bool:
    """Forward-mode differentiation asks whether a tangent could lie as its tensor does."""
    return args[0].numel() == args[1].numel()


@handler(aten.is_pinned.default)
def _pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return args[0]._local.is_pinned()


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last of a strided tensor."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


@handler(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """as_strided(): reads memory as one card would have it, so that must be there: all of it, and from its beginning."""
    x, shape, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    # Also from the first element of memory where the view is of all that its base has: fill_diagonal_() of what cdist() gives.
    begins = offset is None or (offset == 0 and x._base is not None and x._base.numel() == x.numel())
    own = begins and _span(shape, stride) <= _span(x._spec.shape, x._spec.stride) == x.numel()
    if x._is_view() and not own:
        raise DispatchError(
            f"as_strided of {describe(x)}, which is a view: the memory around it is not on this rank. Take it from a copy, "
            "x.clone().as_strided(...), or index instead"
        )
    spec = x._spec
    if not spec.here:
        x._become(
            Layout.replicated(x.mesh, x.dim()), "as_strided", "x", "asked for", explicit=True
        )  # as it is on its mesh
        meta = func(spec.meta(), *args[1:], **kwargs)
        return wrap(x._local.detach(), Spec.like(Layout.replicated(x.mesh, meta.dim()), meta, spec.device))
    local = whole_on_mesh(x, "as_strided")
    shares = spec.layout.is_replicated and local.stride() == spec.stride and local.storage_offset() == 0
    if not shares:
        local = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(local)
    part = func(local, *args[1:], **kwargs)
    made = wrap_view(part, Spec.like(Layout.replicated(x.mesh, part.dim()), part, spec.device))
    memory.view(func, args, kwargs, made, copied=not shares)
    return made


for _name in ("__float__", "__int__", "__index__", "__bool__", "__complex__"):
    setattr(DistTensor, _name, _number(_name))
