"""What is filled as a value of the batch is (``ones_like(y)``) has no data in a look without data, yet its values are known."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch import fakes
from onecard._torch.names import tree_map
from onecard.rules.call import Schema
from onecard.static.passes.row_numbers import is_real

_MOST = 1 << 20  # elements that are computed
_GARBAGE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_FILLED = {"zeros": 0.0, "ones": 1.0}


class Shadows:
    """Tensors with data in place of those that have none, where the step makes them of numbers and shapes alone."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # None: has data itself

    def of(self, x: Tensor) -> Tensor:
        """The tensor with data; itself, if there is no other."""
        found: Tensor | None = self._known.get(x)
        return x if found is None else found

    def has(self, x: Tensor) -> bool:
        """Whether the step has made a tensor of numbers and shapes alone."""
        return x in self._known

    def look(
        self, func: Any, schema: Schema, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """A call has made something that was not drawn."""
        if schema.written:
            known = all(x in self._known for x in given)
            if known and any(self._known[x] is not None for x in given):
                known = (
                    self._again(func, args, kwargs) is not None
                )  # of a view: into the memory of what it is a view of
            if not known:
                self._known.clear()  # views of what is written to, too
            return
        if len(made) != 1 or not (is_real(made[0]) or fakes.is_fake(made[0])) or made[0].numel() > _MOST:
            return
        fill = self._fill(schema.functional, args, kwargs)
        lifted = schema.functional in ("lift_fresh", "lift_fresh_copy")  # of Python's numbers
        known = lifted or (schema.functional not in _GARBAGE and all(x in self._known for x in given))
        if is_real(made[0]):
            if known or fill is not None:
                self._known[made[0]] = None
        elif fill is not None:
            self._known[made[0]] = torch.full(tuple(made[0].shape), fill, dtype=made[0].dtype, device=made[0].device)
        elif known:
            found = self._again(func, args, kwargs)
            if isinstance(found, Tensor):
                self._known[made[0]] = found

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
