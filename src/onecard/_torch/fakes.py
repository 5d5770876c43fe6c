"""Tensors without data among tensors that have some: what torch does not promise to keep of both."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names

loader_iterator: Any = import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
"""What goes through a data loader, with or without workers."""


def sharded_memory() -> list[Any]:
    """The modules of torch's ``fully_shard`` that give up memory of gathered parameters and take it again: ``alloc_storage``."""
    folder = "torch.distributed.fsdp._fully_shard"
    found = [names._take(f"{folder}.{name}:alloc_storage", None) for name in ("_fsdp_param", "_fsdp_param_group")]
    return [
        import_module(f"{folder}.{name}")
        for name, there in zip(("_fsdp_param", "_fsdp_param_group"), found, strict=True)
        if there
    ]


def is_fake(x: Any) -> bool:
    """Whether a tensor has no data."""
    return isinstance(x, _kind())


def values_needed() -> tuple[type[Exception], ...]:
    """What torch raises where an operator's result cannot be told without values."""
    module = import_module("torch._subclasses.fake_tensor")
    return module.DataDependentOutputException, module.DynamicOutputShapeException


def is_of(x: Any, mode: Any) -> bool:
    """Whether a tensor has data, or is one of this mode's that has none."""
    return not is_fake(x) or x.fake_mode is mode


DEVICE = "_onecard_device"
"""Noted on a tensor that has never been in memory: where it would be."""


def asks_device(func: Any, args: Any) -> bool:
    """Whether a call asks where a tensor without data is (``fake_device``): nothing to a mode, and a third of its calls."""
    return func is _DEVICE and isinstance(args[0], _kind())


def device_of(x: Tensor) -> torch.device:
    """A tensor's device; one without data would run an operator to tell, which every mode sees."""
    found: torch.device = x.fake_device if is_fake(x) else getattr(x, DEVICE, x.device)  # type: ignore[attr-defined]
    return found


@lru_cache(maxsize=1)
def _kind() -> type:
    return import_module("torch._subclasses.fake_tensor").FakeTensor


def as_fake(x: Tensor) -> Tensor:
    """The tensor without data that stands for one with data: the same one each time."""
    return mode_now().from_tensor(x)


def unnoted(x: Tensor) -> None:
    """Have a mode forget for which tensor with data this one stands: torch swaps none that is held by a weak reference."""
    if is_fake(x):
        memo: Any = x.fake_mode.fake_tensor_converter.meta_converter.tensor_memo  # type: ignore[attr-defined]
        for key in [key for key, other in memo.items() if other is x]:
            del memo[key]


def again(mode: Any) -> AbstractContextManager[Any]:
    """Inside, tensors that are made have no data, by that mode; as it is, if they have none already."""
    return nullcontext() if mode is None or names.fakes() else mode


def mode_now() -> Any:
    """The mode in which tensors are made without data; None: they have some."""
    return names._mode_of(names._FAKE)


def stand_in(x: Tensor) -> Tensor:
    """A tensor without data of the same shape, strides, dtype and device, in a mode that makes such."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device_of(x))


def known(x: Any) -> Tensor | None:
    """The data of a tensor that was made of Python's numbers and is kept beside it; None where there is none."""
    return getattr(x, "constant", None)


def local_of(x: Any) -> Tensor:
    """What a rank holds of a ``DTensor``: itself, of which ``to_local`` gives a view."""
    return x._local_tensor


# -- a mode without data that remembers ------------------------------------------------------------------------------------

_CONSTANTS = frozenset(
    [int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
_LISTS = (list, tuple, torch.Size)
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_DEVICE = torch.ops.prim.device.default
_GROUPED, _EMPTY = torch.ops.aten._grouped_mm.default, torch.ops.aten.new_empty.default
_MOST = 20_000
"""Calls that are remembered; then they are forgotten, and looked at anew."""


@lru_cache(maxsize=1)
def remembering() -> type:
    """torch's mode in which tensors have no data, which remembers what a call gives. torch's own mode does so, too, and takes
    three hundred calls of Python to look: this one takes a hundred, where operands are plain.
    """
    module = import_module("torch._subclasses.fake_tensor")
    fake, known = module.FakeTensor, dict[Any, Any]()

    class Remembering(module.FakeTensorMode):  # type: ignore[name-defined]
        def _by_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if func is _GROUPED and args[0].device.type == "cpu" and args[0].dtype != torch.bfloat16:
                return super().__torch_dispatch__(_EMPTY, types, (args[0], grouped_shape(*args[:3], **kwargs)), {})
            # A call that fails raises; torch 2.14 shows its traceback besides, above the words that the user gets.
            log = module.log
            was, log.disabled = log.disabled, True
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                log.disabled = was

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _DEVICE and type(args[0]) is fake:
                return args[0].fake_device
            asked, result = self._remembered(func, args, kwargs)
            if result is not None:
                return result
            result = self._by_torch(func, types, args, kwargs or {})
            if asked is not None and asked not in known:
                if len(known) >= _MOST:
                    known.clear()
                known[asked] = (func, _seen(func, args, kwargs or {}, result, fake))  # func keeps its identity
            return result

        def _remembered(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            """What such calls are known by, and the result of one that is; None: torch has to tell."""
            key: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
            key.append(names.default_device())
            if not _told(key, args, self, fake) or (kwargs and not _told(key, kwargs.items(), self, fake)):
                return None, None
            asked = tuple(key)
            kind, parts = known[asked][1] if asked in known else (None, ())
            if kind is None:
                return asked, None
            made = [args[part] if type(part) is int else _like(part, args, self, fake) for part in parts]
            return asked, kind(made) if kind is not Tensor else made[0]

        def remembered(self, func: Any, args: Any, kwargs: Any) -> Any:
            """The result of a call that was made before in this mode, which need not be on for it; None: it was not."""
            return self._remembered(func, args, kwargs)[1]

    return Remembering


def grouped_shape(x: Tensor, y: Tensor, offs: Tensor | None = None, **_: Any) -> list[int]:
    """Of a product in groups: torch's own function for it (2.15) knows what GPUs take, and CPUs take any dtype."""
    groups = [len(offs)] if offs is not None and x.dim() == y.dim() == 2 else [x.shape[0]] if x.dim() == y.dim() else []
    return [*groups, x.shape[-2], y.shape[-1]]


def _told(key: list[Any], values: Iterable[Any], mode: Any, fake: type) -> bool:
    """Note what of arguments a result depends on; whether that is all."""
    for value in values:
        kind = type(value)
        if kind is fake:
            plain = value.layout is torch.strided and not value.dtype.is_complex and not value.is_neg()
            if value.fake_mode is not mode or value.constant is not None or not plain:
                return False
            key += (fake, value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset())
        elif kind in _CONSTANTS:
            key += (kind, value)
        elif isinstance(value, _LISTS):
            key += (_LISTS, len(value))
            if not _told(key, value, mode, fake):
                return False
        else:
            return False
    return True


def _seen(func: Any, args: Any, kwargs: Any, result: Any, fake: type) -> tuple[Any, list[Any]]:
    """What makes a result again: its kind, and of each tensor the number of the argument that it is, or its facts: with its
    place in the memory of the first argument, if it is a view of the only one."""
    never: tuple[Any, list[Any]] = (None, [])
    if not isinstance(func, names.OpOverload) or func.namespace not in ("aten", "prims"):
        return never
    if any(tag in func.tags for tag in _TAGS) or any(a.is_out for a in func._schema.arguments):
        return never
    results: Any = (
        [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else None
    )
    given = [x for x in names.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not results or not all(type(x) is fake for x in results):
        return never
    if not all(x.layout is torch.strided for x in (*given, *results)):
        return never
    blocks, parts, own = {x.untyped_storage()._cdata for x in given}, list[Any](), set[int]()
    alone = len(given) == 1 and given[0] is args[0]
    for x in results:
        block = x.untyped_storage()._cdata
        same = next((i for i, a in enumerate(args) if a is x), None)
        if same is not None:
            parts.append(same)
        elif not _is_plain(x) or not (_has_its_own(x, blocks | own) or (alone and block in blocks)):
            return never
        else:
            own |= {block} - blocks
            facts = (tuple(x.shape), x.stride(), x.dtype, x.fake_device)
            parts.append((*facts, x.storage_offset() if block in blocks else None))
    return (Tensor if isinstance(result, Tensor) else list if isinstance(result, list) else tuple, parts)


def _has_its_own(x: Any, blocks: set[int]) -> bool:
    """Whether a result fills a memory of its own."""
    memory = x.untyped_storage()
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").untyped_storage()
    return x.storage_offset() == 0 and memory._cdata not in blocks and bool(memory.nbytes() == like.nbytes())


def _is_plain(x: Any) -> bool:
    plain = x.layout is torch.strided and not x.requires_grad and x.constant is None and not x.dtype.is_complex
    return plain and not x.is_neg()


def _like(facts: Any, args: Any, mode: Any, fake: Any) -> Any:
    shape, stride, dtype, device, offset = facts
    made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if offset is not None:
        made.set_(args[0].untyped_storage(), offset, shape, stride)
    return fake(mode, made, device)
