"""Build a model without memory, and make each parameter only as the shard that a rank holds.

Inside ``deferred_init`` new tensors are on the meta device. What is done to them, there and later, is written down, with
the key of each random operator. When ``shard_tensor`` lays such a tensor out, the operators that made it run again on
DistTensors (see replay.py). Source: deferred module initialisation in torchdistX and in PyTorch's FSDP (meta device).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard._torch.names import TorchDispatchMode, tree_leaves, tree_map
from onecard.errors import DispatchError
from onecard.random import new_key
from onecard.rules.call import schema_of, written
from onecard.tensor.deferred.calls import FILLS, DeferredCall, DeferredCalls, forget_the_dead, record_of, storage_of
from onecard.tensor.deferred.replay import whole
from onecard.tensor.dispatch.entries import drawing
from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten


class DeferredTensor(Tensor):
    """A tensor on the meta device that remembers how its values are made. ``shard_tensor`` makes them."""

    __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]
    is_meta = False  # some of torch.nn.init leave meta tensors alone; this one is initialised like any other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next(t for t in tensors if isinstance(t, DeferredTensor))
        record = record_of(first)
        if record is None:
            raise DispatchError(f"{func}: the record of {_named(first)} is gone")
        return _do(record, func, args, dict(kwargs or {}), tensors)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor({list(self.shape)}, {self.dtype}, requires_grad={self.requires_grad})"

    __str__ = __repr__

    def __setitem__(self, index: Any, value: Any) -> None:
        # Of a number torch would make a tensor on this one's device, where it has no value.
        super().__setitem__(
            index, value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype, device="cpu")
        )

    def tolist(self) -> Any:
        """The values as nested lists."""
        return whole(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a tensor that requires grad. Use x.detach().numpy() instead.")
        return whole(self).numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DispatchError(
            f"{_named(self)} cannot be saved: its values are not made yet. Lay it out first (onecard.shard_layer, shard_tensor)"
        )


class deferred_init(TorchDispatchMode):
    """Inside, a module is built on the meta device; ``shard_layer`` and ``shard_tensor`` then make only local shards.

    The values are those of the same program on one card (``one_card_random``): each random operator draws its key when
    it is recorded, so order and seed count as ever, also for what is done to the tensors after the ``with``, until they
    are laid out. What asks for a value (``x.max().item()``) computes the tensor in question whole, for a moment.

    Raises:
        DispatchError: a recorded tensor is used where its value is needed and it cannot be made.

    Source: ``torchdistx.deferred_init``; the keys of random operators make it independent of the layout.

    Example:
        >>> from onecard import ProcessMesh, shard_layer
        >>> _ = torch.manual_seed(0)
        >>> with deferred_init():
        ...     layer = torch.nn.Linear(3, 2)
        >>> layer.weight.device
        device(type='meta')
        >>> shard_layer(layer, ProcessMesh([0], ["x"])).weight.to_local().shape
        torch.Size([2, 3])
    """

    def __init__(self) -> None:
        super().__init__()
        self._record = DeferredCalls()

    def __enter__(self) -> deferred_init:
        forget_the_dead()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors and any(a.name == "device" for a in func._schema.arguments):
            return _note(self._record, func, args, kwargs)
        if any(isinstance(t, DeferredTensor | DistTensor) for t in tensors):
            return func(*args, **kwargs)
        handler = drawing.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)


def _do(record: DeferredCalls, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Note a call, or run it for real where a value is wanted."""
    touched = [t for _, t in written(func, args, kwargs)]
    strangers = any(isinstance(t, DistTensor) for t in tensors)
    if not strangers and not _asks_for_values(func):
        if all(isinstance(t, DeferredTensor) for t in touched):
            _check_not_laid_out(record, func, touched)
            return _note(record, func, args, kwargs)
    elif any(isinstance(t, DeferredTensor) for t in touched):
        raise DispatchError(
            f"{func} writes a DistTensor into {_named(touched[0])}. Lay that out first "
            "(onecard.shard_tensor), then write to what you get"
        )
    return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _asks_for_values(func: Any) -> bool:
    """Whether a result is a number, or a tensor whose shape depends on values."""
    numbers = any(r.type.kind() not in ("TensorType", "ListType") for r in func._schema.returns)
    return numbers or torch.Tag.dynamic_output_shape in func.tags


def _check_not_laid_out(record: DeferredCalls, func: Any, written: list[Tensor]) -> None:
    for tensor in written:
        if storage_of(tensor) in record.laid_out:
            raise DispatchError(
                f"{func} changes {_named(tensor)}, which was laid out before: its parts would not follow. "
                "Change the DistTensor that shard_tensor or shard_layer gave, or make the change before"
            )


def _note(record: DeferredCalls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call on the meta device, and write it down."""
    if func is aten.set_.source_Tensor:  # the tensor has the other's memory from now on, and is known by that
        with _torch.DisableDispatch():
            return func(*args)
    handler = drawing.get(func)
    key = new_key(kwargs.pop("generator", None)) if handler is not None else None
    mine = record.slot

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "meta" and not isinstance(value, DeferredTensor):
            raise DispatchError(
                f"{func}: an operand on the meta device {list(value.shape)} that deferred_init did not make has no values"
            )
        return mine(value) or _real(value).clone()

    recorded, options = tree_map(stand_in, (tuple(args), {n: v for n, v in kwargs.items() if n != "device"}))
    reads = frozenset(storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and mine(t))
    if key is not None:
        options["generator"] = key
    schema = schema_of(func)
    device = {"device": "meta"} if any(a.name == "device" for a in func._schema.arguments) and not reads else {}
    with _torch.DisableDispatch():
        result = tree_map(_deferred, func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **device}))
    made = tuple((record.add(t), t.shape, t.dtype) for t in tree_leaves(result) if isinstance(t, Tensor))
    writes = frozenset(storage_of(t) for _, t in written(func, args, kwargs)) | {slot.storage for slot, _, _ in made}
    fills = schema.name in FILLS and len(reads) == 1 and args[0].nbytes == args[0].untyped_storage().nbytes()
    record.append(DeferredCall(func, recorded, options, made, reads, writes, fills))
    return result


def _named(tensor: Tensor) -> str:
    return f"the deferred tensor {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _deferred(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, DeferredTensor):
        return Tensor._make_subclass(DeferredTensor, value)
    return value


def _real(value: Any) -> Any:
    """A deferred tensor's value, whole; anything else as it is."""
    return whole(value) if isinstance(value, DeferredTensor) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) and value.device.type != "meta" else value


__all__ = ["DeferredTensor", "deferred_init"]
