"""Run again what made a deferred tensor: on DistTensors, so that each rank makes its part, or whole for a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_leaves, tree_map
from onecard.comm.base.warned import warn
from onecard.comm.issue import groups
from onecard.comm.world import world
from onecard.errors import DispatchError
from onecard.place.layout import Layout
from onecard.random import Key
from onecard.rules.call import schema_of
from onecard.tensor.aliasing.region import VIEWS, Region
from onecard.tensor.deferred.calls import DeferredCall, DeferredCalls, Slot, record_of
from onecard.tensor.deferred.pieces import answer
from onecard.tensor.dispatch.entries import drawing
from onecard.tensor.dispatch.fallback import GatheredOperatorWarning
from onecard.tensor.dist_tensor import DistTensor, describe, wrap
from onecard.tensor.spec import Spec, contiguous_stride

Make = Callable[[DeferredCall], Any]  # what a call that has no tensor among its arguments gives
LARGE = 2**27  # bytes of a tensor above which making it whole is said


def materialise(tensor: Tensor, layout: Layout) -> DistTensor:
    """The value of a tensor from ``deferred_init``, each rank its part.

    Raises:
        DispatchError: a meta tensor that was not made there.
    """
    record, slot = _known(tensor)
    record.laid_out.add(slot.storage)
    target = layout.reduced()
    try:
        value = _run(record, slot, _laid_out(target, tensor.shape))
    except DispatchError as fault:
        _tell(tensor, f"its initialisation does not run on parts ({fault})")
        value = _run(record, slot, _laid_out(Layout.replicated(layout.mesh, tensor.dim()), tensor.shape))
    spec = Spec.make(layout, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype, world.device())
    if not isinstance(value, DistTensor):
        given, value = value, empty(tensor.shape, target, tensor.dtype)
        if spec.here:
            value._local.copy_(given[target.local_slices(tensor.shape)])
    if value._spec.layout is not layout:
        value = wrap(value._become(layout, "deferred_init", "x", "asked for", explicit=True), spec)
    return value


def whole(tensor: Tensor) -> Tensor:
    """The value of a tensor from ``deferred_init``, on every rank."""
    record, slot = _known(tensor)
    answered = answer(record, slot)
    if answered is not None:
        return answered
    largest = max(
        (shape.numel() * dtype.itemsize for n in record.needed(slot.storage) for _, shape, dtype in n.results)
    )
    if largest > LARGE:
        _tell(tensor, "its value is asked for (.item(), float(x.max()), print(x.tolist()))", largest)
    return _run(record, slot, _plain)


def empty(size: Sequence[int], layout: Layout, dtype: torch.dtype) -> DistTensor:
    """A DistTensor without values."""
    groups.check_world(layout.mesh)
    shape, device = torch.Size(size), world.device()
    spec = Spec.make(layout, shape, contiguous_stride(shape), dtype, device)
    local = layout.local_shape(shape) if spec.here else (0,)
    return wrap(torch.empty(local, dtype=dtype, device=device), spec)


def _known(tensor: Tensor) -> tuple[DeferredCalls, Slot]:
    record = record_of(tensor)
    slot = record.slot(tensor) if record is not None else None
    if record is None or slot is None:
        raise DispatchError(
            f"{describe(tensor)} on the meta device has no values, and onecard does not know how to make them. Build the "
            "module in 'with onecard.deferred_init():', or off the meta device"
        )
    return record, slot


def _tell(tensor: Tensor, why: str, nbytes: int | None = None) -> None:
    nbytes = tensor.nbytes if nbytes is None else nbytes
    if nbytes > LARGE:
        warn(
            f"deferred_init makes {describe(tensor)} whole on every rank for a moment ({nbytes / 2**20:.0f} MiB): {why}",
            GatheredOperatorWarning,
        )


def _run(record: DeferredCalls, slot: Slot, make: Make) -> Any:
    """Run again what made a tensor."""
    values: dict[int, Any] = {}
    for node in record.needed(slot.storage):
        args, kwargs = tree_map(lambda v: values[v.number] if isinstance(v, Slot) else v, (node.args, node.kwargs))
        result = make(node) if not node.reads else _call(node, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor | Region)]
        values.update((s.number, value) for (s, _, _), value in zip(node.results, made, strict=True))
    result = values[slot.number]
    return result.read() if isinstance(result, Region) else result


def _call(node: DeferredCall, args: Any, kwargs: Any) -> Any:
    func, first = node.func, args[0]
    if func in VIEWS and isinstance(first, DistTensor) and any(first._spec.layout.dims):
        first = Region.of(first)
    if isinstance(first, Region):
        done = first.call(func, args, kwargs)
        if done is not None:
            return done
    args, kwargs = tree_map(lambda v: v.read() if isinstance(v, Region) else v, (args, kwargs))
    if isinstance(kwargs.get("generator"), Key):
        return drawing[func](func, args, kwargs)
    return func(*args, **kwargs)


def _plain(node: DeferredCall) -> Tensor:
    """A recorded factory call, for real and whole."""
    kwargs = dict(node.kwargs)
    named = schema_of(node.func).arguments
    options = {"dtype": node.results[0][2], "device": world.device()} if "dtype" in named else {}
    if isinstance(kwargs.get("generator"), Key):
        return drawing[node.func](node.func, node.args, {**kwargs, **options})
    return node.func(*node.args, **{**kwargs, **options})


def _laid_out(layout: Layout, shape: torch.Size) -> Make:
    """Factory calls as DistTensors: of the shape that is wanted in the layout that is wanted, others replicated."""
    local_fill = {"empty": "", "empty_strided": "", "zeros": "zero_", "ones": "fill_", "full": "fill_"}

    def make(node: DeferredCall) -> Tensor:
        name = schema_of(node.func).name
        (_, size, dtype) = node.results[0]
        draws = isinstance(node.kwargs.get("generator"), Key) and name != "randperm"
        if name not in local_fill and not draws:
            return _plain(node)
        here = layout if size == shape else Layout.replicated(layout.mesh, len(size))
        made = empty(size, here, dtype)
        if draws:
            given = {"out": made, **node.kwargs}
            return drawing[node.func](node.func, node.args, given)
        if made._spec.here and local_fill[name]:
            value = node.args[1] if name == "full" else 1
            made._local.zero_() if name == "zeros" else made._local.fill_(value)
        return made

    return make


__all__ = ["empty", "materialise", "whole"]
