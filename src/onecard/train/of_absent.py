"""What is computed of what only others have, only they have: no value is needed here, so no refusal either.

Outside of recorded steps every rank runs the whole program. An operator on a tensor that other ranks have runs on its shapes; the
result has none of its values, and says so to who wants them. A tensor that such a result is written into becomes one that only
others have, as on one card it would no longer be what it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch.modes import DispatchMode
from onecard._torch.names import (
    storage_users,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    without_torch_function,
)
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import is_read, is_staged


class Needed(Exception):
    """A value is needed here; says what for, if that is not plain."""


class _Writes(DispatchMode):
    """Notes the memory that is written to; draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Needed("it draws random numbers, and the ranks' would part")
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.update(map(_memory, tensors(given.get(argument.name))))
        return func(*args, **(kwargs or {}))


def computed(
    func: Callable[..., Any], args: Any, kwargs: Any, is_absent: Callable[[Any], bool], become: Callable[[Tensor], Any]
) -> Any:
    """What a function gives, without values.

    Args:
        become: makes a tensor without data, or one of the program's, a tensor that only others have.

    Raises:
        Needed: it wants a value.
    """
    if getattr(func, "__name__", "").startswith("_foreach_"):
        return _of_lists(func, args, kwargs, is_absent, become)
    flat, tree = tree_flatten((args, kwargs))
    shapes = [_shape_of(x) if isinstance(x, Tensor) else x for x in flat]
    given = {id(shape): x for shape, x in zip(shapes, flat, strict=True) if isinstance(x, Tensor)}
    mode = _Writes()
    call, named = tree_unflatten(shapes, tree)
    try:
        with without_torch_function(), torch.no_grad(), mode:
            result = func(*call, **named)
    except Needed:
        raise
    except Exception as why:
        raise Needed("") from why
    made = [*tensors(result)]
    if (not made and not mode.written) or any(not x.is_meta for x in made):
        raise Needed("")
    for shape in shapes:
        if isinstance(shape, Tensor) and _memory(shape) in mode.written and not is_absent(given[id(shape)]):
            for each in _same_memory(given[id(shape)]):
                become(each)
    return tree_map(lambda x: given[id(x)] if id(x) in given else become(x) if isinstance(x, Tensor) else x, result)


def tensors(x: Any) -> Iterator[Tensor]:
    """Those in lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor))


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _shape_of(x: Tensor) -> Tensor:
    if isinstance(x, DistTensor):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise Needed("")
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _same_memory(x: Tensor) -> list[Tensor]:
    """A tensor that is written into, and all others that have its memory (``p.detach()``): none may keep what it was before."""
    memory = x.untyped_storage()
    others = storage_users(memory._cdata) - 2  # without x and ``memory``
    found = [x, *(_others(x) if others else ())]
    whole = x.numel() * x.element_size() == memory.nbytes()
    if len(found) != others + 1 or not whole or any(type(each) not in (Tensor, nn.Parameter) for each in found):
        raise Needed("it is written into memory that another tensor has as well")
    if any(is_staged(each) or is_read(each) for each in found):
        raise Needed("it is written into what this rank trains or reads")
    return found


def _others(x: Tensor) -> list[Tensor]:
    memory = x.untyped_storage()._cdata
    every = (o for o in gc.get_objects() if o is not x and type(o) in (Tensor, nn.Parameter))
    return [o for o in every if o.layout is torch.strided and o.untyped_storage()._cdata == memory]


def _of_lists(func: Any, args: Any, kwargs: Any, is_absent: Callable[[Any], bool], become: Any) -> Any:
    """An operator on lists, place by place: where something is absent without its values, all others at once."""
    count = len(next(x for x in args if isinstance(x, list | tuple)))
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple) and len(x) == count]
    alone = [i for i in range(count) if any(map(is_absent, (x[i] for x in lists)))]
    rest = [i for i in range(count) if i not in alone]

    def at(places: Sequence[int]) -> Any:
        def taken(x: Any) -> Any:
            return [x[i] for i in places] if isinstance(x, list | tuple) and len(x) == count else x

        return [taken(x) for x in args], {k: taken(x) for k, x in kwargs.items()}

    found: dict[int, Any] = {}
    for i in alone:
        chosen, named = at([i])
        flat = _Listed(func)
        found[i] = computed(flat, chosen, named, is_absent, become)
    if rest:
        chosen, named = at(rest)
        with without_torch_function():
            found |= dict(zip(rest, func(*chosen, **named) or [None] * len(rest), strict=True))
    made = [found[i][0] if i in alone and found[i] is not None else found[i] for i in range(count)]
    return None if any(x is None for x in made) else made


class _Listed:
    """A function on lists, whose name does not say so."""

    def __init__(self, func: Any) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*args, **kwargs)


__all__ = ["Needed", "computed", "tensors"]
