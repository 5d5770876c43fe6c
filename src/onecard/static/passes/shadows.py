"""What a step makes of numbers, shapes and the program's own tensors: its values are known in a look without data, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch import fakes
from onecard._torch.names import tree_leaves, tree_map
from onecard.comm.base.state import faked
from onecard.rules.call import Schema
from onecard.static.passes.dependence import Kind, told
from onecard.static.passes.row_numbers import is_real
from onecard.tensor.dist_tensor import DistTensor

_MOST = 1 << 20  # elements that are computed
_FEW = 4096  # elements of a tensor of the program's own, for what is made of it to be computed
_GARBAGE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_FILLED = {"zeros": 0.0, "ones": 1.0}


class Shadows:
    """Tensors with data in place of those that have none, where the step makes them without the batch: of numbers, shapes, and
    small tensors of the program's own.

    Args:
        kinds: how tensors depend on the batch, as far as that is known.
    """

    def __init__(self, kinds: Mapping[Tensor, Kind]) -> None:
        self._known: Any = WeakIdKeyDictionary()  # with the number of their memory; None: has data itself
        self._in: dict[int, list[weakref.ref[Tensor]]] = {}  # those, by that number
        self._kinds = kinds
        self._empty: Any = WeakIdKeyDictionary()  # made in the step, not written to when it was made
        self._whole: Any = WeakIdKeyDictionary()  # views of all elements of one of the program's own
        self._lost = set[int]()  # memory of the program's own that the step has written to

    def of(self, x: Tensor) -> Tensor:
        """The tensor with data; itself, if there is no other."""
        data: Tensor | None = self._known[x][1] if self.has(x) else None
        return x if data is None else data

    def has(self, x: Tensor) -> bool:
        """Whether the step has made a tensor without the batch, which lies where it was made."""
        known = self._known.get(x)
        return known is not None and known[0] == memory_of(x)

    def made(self, x: Tensor) -> bool:
        """Whether it may be another for another number of rows: all elements of a weight, as they lie or transposed, are not."""
        return self.has(x) and x not in self._whole

    def _own(self, x: Tensor) -> bool:
        """Whether a tensor is the program's own, as it was before the step."""
        plain = not faked.here and type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.layout is torch.strided
        if not plain or x.numel() > _FEW or fakes.is_fake(x) or told(self._kinds.get(x)):
            return False
        held = x.untyped_storage().nbytes()  # 0: given back for now, as a gathered parameter's between two uses
        return held >= (x.storage_offset() + x.numel()) * x.element_size() and memory_of(x) not in self._lost

    def look(
        self, func: Any, schema: Schema, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """A call has made something that was not drawn."""
        if schema.written:
            self._write(func, schema, args, kwargs, given)
            return
        if not made or any(not _may_stand_in(x) or x.numel() > _MOST for x in made):
            return
        if schema.functional in _GARBAGE:
            self._empty[made[0]] = True
        fill = self._fill(schema.functional, args, kwargs)
        lifted = schema.functional in ("lift_fresh", "lift_fresh_copy")  # of Python's numbers
        own = [x for x in given if not self.has(x)]
        known = lifted or (schema.functional not in _GARBAGE and (not own or all(map(self._own, own))))
        of_one = known and not lifted and len(given) == 1
        if of_one and (own or given[0] in self._whole) and _is_all_of(made[0], given[0], schema.views):
            self._whole[made[0]] = True
        if all(map(is_real, made)):
            for x in made if known or fill is not None else ():
                self._know(x, None)
        elif fill is not None:
            self._know(made[0], torch.full(tuple(made[0].shape), fill, dtype=made[0].dtype, device=made[0].device))
        elif known:
            found = [x for x in tree_leaves(self._again(func, args, kwargs)) if isinstance(x, Tensor)]
            for x, data in zip(made, found, strict=len(found) > 0):
                self._know(x, data.clone() if own else data)  # not the program's own memory

    def _know(self, x: Tensor, data: Tensor | None) -> None:
        number = memory_of(x)
        self._known[x] = (number, data)
        self._in.setdefault(number, []).append(weakref.ref(x))

    def _write(self, func: Any, schema: Schema, args: Any, kwargs: Any, given: Sequence[Tensor]) -> None:
        """A call writes: into the shadow, of a view into the memory of what it is of; or nothing is known of that memory."""
        targets = [*_targets(schema, args, kwargs)]
        name, memory = schema.functional, {*map(memory_of, targets)}
        known = all(self.has(x) or (all(x is not t for t in targets) and self._own(x)) for x in given)
        if known and (all(self._known[x][1] is None for x in targets) or self._again(func, args, kwargs) is not None):
            return
        self._lost |= memory
        for seen in [seen for number in memory for seen in self._in.pop(number, ())]:
            if (x := seen()) is not None and x in self._known:
                del self._known[x]
        if name in ("zero", "fill", "copy") and targets[0] in self._empty and all(map(self.has, given[1:])):
            x = targets[0]
            self._know(x, None if is_real(x) else torch.zeros(x.shape, dtype=x.dtype, device=x.device))
            if not is_real(x) and self._again(func, args, kwargs) is None:
                del self._known[x]

    def _again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call on what has data; None where that cannot be: nothing is known then."""
        args, kwargs = tree_map(lambda x: self.of(x) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs)))
        with suppress(RuntimeError, ValueError, TypeError):  # a device that is only named
            return func(*args, **kwargs)
        return None

    def _fill(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a call fills its result with; None: it does not."""
        kind = name.removeprefix("new_").removesuffix("_like")
        if kind != "full":
            return _FILLED.get(kind)
        return kwargs.get("fill_value", args[-1])


def _may_stand_in(x: Tensor) -> bool:
    """Whether a plain tensor with the same elements says all of a result: of a distributed one, all ranks' parts."""
    return isinstance(x, DistTensor) or is_real(x) or fakes.is_fake(x)


def _is_all_of(x: Tensor, given: Tensor, views: bool) -> bool:
    """Whether a tensor has all elements of another: a view, of what may be another one's stand-in without data."""
    return x.numel() == given.numel() and (views or memory_of(x) == memory_of(given))


def _targets(schema: Schema, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    named = {**dict(zip(schema.arguments, args, strict=False)), **kwargs}
    for name in schema.written:
        yield from (x for x in tree_leaves(named.get(name)) if isinstance(x, Tensor))


def memory_of(x: Tensor) -> int:
    """A number of the memory that a tensor lies in."""
    local = x._local if isinstance(x, DistTensor) else x
    try:
        return int(local.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(local)
