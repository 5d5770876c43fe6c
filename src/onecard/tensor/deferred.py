"""Build a model without memory, and make each parameter only as the shard that a rank holds.

Inside ``deferred_init`` new tensors are on the meta device and what is done to them is written down, with the key of each
random operator. When ``shard_tensor`` lays such a tensor out, the operators that made it run again on DistTensors.
Source: deferred module initialisation in torchdistX and in PyTorch's FSDP (meta device).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onecard.comm import groups, world
from onecard.errors import DispatchError
from onecard.layout import Layout
from onecard.random import Key, new_key
from onecard.rules.call import schema_of
from onecard.tensor.chance import factories, handlers
from onecard.tensor.dist_tensor import DistTensor, describe, wrap
from onecard.tensor.spec import Spec, contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Slot:
    """A deferred tensor in a recorded call; tensors that share memory have one ``storage``."""

    number: int
    storage: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A recorded call: its arguments with slots for deferred tensors, and its results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[_Slot, torch.Size, torch.dtype], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: bool  # overwrites all of one tensor's memory without a look at it


_FILLS = ("zero_", "fill_", "uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_")


class _Record:
    """All calls of one ``deferred_init``."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.slots: dict[Any, _Slot] = {}
        self.alive: list[Tensor] = []  # while recording, so that no address is used twice

    def slot(self, tensor: Tensor) -> _Slot | None:
        return self.slots.get(_identity(tensor))

    def add(self, tensor: Tensor) -> _Slot:
        found = self.slot(tensor)
        if found is None:
            found = self.slots[_identity(tensor)] = _Slot(len(self.slots), _storage(tensor))
            self.alive.append(tensor)
            _records[found.storage] = (StorageWeakRef(tensor.untyped_storage()), self)
        return found

    def needed(self, storage: int) -> list[_Node]:
        """The calls on which a tensor's memory depends, in order; not those that a later one overwrites."""
        wanted, lost, found = {storage}, set[int](), []
        for node in reversed(self.nodes):
            in_place = bool(schema_of(node.func).written)
            if not node.writes & wanted or (in_place and node.writes <= lost):
                continue
            found.append(node)
            wanted |= node.reads
            if node.fills:
                lost |= node.writes
            else:
                lost -= node.reads  # what is read must be as it was then
        return found[::-1]


_records: dict[int, tuple[StorageWeakRef, _Record]] = {}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _identity(tensor: Tensor) -> Any:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Recorder(TorchDispatchMode):
    """Below autograd: new tensors and what is done to them go to the meta device and into the record."""

    def __init__(self) -> None:
        super().__init__()
        self.record = _Record()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        handler = handlers.get(func) or factories.get(func)
        deferred = any(self.record.slot(t) is not None for t in tensors)
        makes = not tensors and any(a.name == "device" for a in func._schema.arguments)
        if not (deferred or makes) or any(isinstance(t, DistTensor) for t in tensors):
            return handler(func, args, kwargs) if handler is not None and not makes else func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return func(_run(self.record, self.record.slot(args[0]), _plain))  # type: ignore[arg-type]
        key = new_key(kwargs.pop("generator", None)) if handler is not None else None
        result = func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **({"device": "meta"} if makes else {})})
        self._note(func, args, kwargs, result, key)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, key: Key | None) -> None:
        slots = self.record.slot
        made = tuple((self.record.add(t), t.shape, t.dtype) for t in tree_leaves(result) if isinstance(t, Tensor))

        def stand_in(value: Any) -> Any:
            return slots(value) or value.clone() if isinstance(value, Tensor) else value

        recorded = tree_map(stand_in, (tuple(args), kwargs))
        reads = frozenset(leaf.storage for leaf in tree_leaves(recorded) if isinstance(leaf, _Slot))
        written = frozenset(
            leaf.storage
            for name, value in zip(schema_of(func).arguments, recorded[0], strict=False)
            for leaf in tree_leaves(value)
            if name in schema_of(func).written and isinstance(leaf, _Slot)
        )
        kwargs = {n: v for n, v in recorded[1].items() if n != "device"}
        if key is not None:
            kwargs["generator"] = key
        writes = written | {slot.storage for slot, _, _ in made}
        fills = (
            schema_of(func).name in _FILLS and args[0].numel() * args[0].itemsize == args[0].untyped_storage().nbytes()
        )
        self.record.nodes.append(_Node(func, recorded[0], kwargs, made, reads, writes, fills and len(reads) == 1))


class deferred_init(TorchFunctionMode):
    """Inside, a module is built on the meta device; ``shard_layer`` and ``shard_tensor`` then make only local shards.

    The values are those of the same program on one card (``one_card_random``): each random operator draws its key when
    it is recorded, so order and seed count as ever. What asks for a value (``.item()``, ``if x.any()``, and with it
    ``torch.nn.init.trunc_normal_``) computes the tensor in question whole, for a moment. Initialise inside: what is done
    to a meta tensor afterwards is lost.

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
        self._below = _Recorder()

    def __enter__(self) -> deferred_init:
        for storage in [s for s, (ref, _) in _records.items() if ref.expired()]:
            del _records[storage]
        super().__enter__()
        self._below.__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._below.__exit__(*fault)
        super().__exit__(*fault)
        self._below.record.alive.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and self._below.record.slot(args[0]) is not None:
            return False  # some of torch.nn.init leave meta tensors alone
        return func(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


Make = Callable[[_Node], Any]  # what a call that has no tensor among its arguments gives


def _run(record: _Record, slot: _Slot, make: Make) -> Any:
    """Run again what made a tensor."""
    values: dict[int, Any] = {}
    for node in record.needed(slot.storage):
        args, kwargs = tree_map(lambda v: values[v.number] if isinstance(v, _Slot) else v, (node.args, node.kwargs))
        if not node.reads:
            result = make(node)
        elif "generator" in kwargs and isinstance(kwargs["generator"], Key):
            result = handlers[node.func](node.func, args, kwargs)
        else:
            result = node.func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        values.update((s.number, value) for (s, _, _), value in zip(node.results, made, strict=True))
    return values[slot.number]


def _plain(node: _Node) -> Tensor:
    """A recorded factory call, for real and whole."""
    kwargs = dict(node.kwargs)
    options = (
        {"dtype": node.results[0][2], "device": world.device()} if "dtype" in schema_of(node.func).arguments else {}
    )
    if isinstance(kwargs.get("generator"), Key):
        return factories[node.func](node.func, node.args, {**kwargs, **options})
    return node.func(*node.args, **{**kwargs, **options})


def _laid_out(layout: Layout, shape: torch.Size) -> Make:
    """Factory calls as DistTensors: of the shape that is wanted in the layout that is wanted, others replicated."""
    local_fill = {"empty": "", "empty_strided": "", "zeros": "zero_", "ones": "fill_", "full": "fill_"}

    def make(node: _Node) -> Tensor:
        name = schema_of(node.func).name
        (_, size, dtype) = node.results[0]
        random = isinstance(node.kwargs.get("generator"), Key) and name != "randperm"
        if name not in local_fill and not random:
            return _plain(node)
        here = layout if size == shape else Layout.replicated(layout.mesh, len(size))
        made = empty(size, here, dtype)
        if random:
            given = {"out": made, **node.kwargs}
            return factories[node.func](node.func, node.args, given)
        if made._spec.here and local_fill[name]:
            value = node.args[1] if name == "full" else 1
            made._local.zero_() if name == "zeros" else made._local.fill_(value)
        return made

    return make


def empty(size: Sequence[int], layout: Layout, dtype: torch.dtype) -> DistTensor:
    """A DistTensor without values."""
    groups.check_world(layout.mesh)
    shape, device = torch.Size(size), world.device()
    spec = Spec.make(layout, shape, contiguous_stride(shape), dtype, device)
    local = layout.local_shape(shape) if spec.here else (0,)
    return wrap(torch.empty(local, dtype=dtype, device=device), spec)


def materialise(tensor: Tensor, layout: Layout) -> DistTensor:
    """The value of a tensor from ``deferred_init``, each rank its part.

    Raises:
        DispatchError: a meta tensor that was not made there, or was replaced afterwards.
    """
    ref, record = _records.get(_storage(tensor), (None, None))
    slot = record.slot(tensor) if record is not None and ref is not None and not ref.expired() else None
    if record is None or slot is None:
        raise DispatchError(
            f"{describe(tensor)} on the meta device has no values, and onecard does not know how to make them. Build the "
            "module in 'with onecard.deferred_init():' (and convert its dtype in there, too), or off the meta device"
        )
    target = layout.settled()
    try:
        value = _run(record, slot, _laid_out(target, tensor.shape))
    except DispatchError:
        # A write to a row or a column of a cut tensor: make it whole, then cut it.
        value = _run(record, slot, _laid_out(Layout.replicated(layout.mesh, tensor.dim()), tensor.shape))
    spec = Spec.make(layout, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype, world.device())
    if not isinstance(value, DistTensor):
        whole, value = value, empty(tensor.shape, target, tensor.dtype)
        if spec.here:
            value._local.copy_(whole[target.local_slices(tensor.shape)])
    if value._spec.layout is not layout:
        value = wrap(value._become(layout, "deferred_init", "x", "asked for", explicit=True), spec)
    return value


__all__ = ["deferred_init", "empty", "materialise"]
