"""Sketch: a step that is written down without being done: what the program holds has no data while it runs.

Nothing of the program is computed, changed or sent, so that a model may be larger than this rank. What the step makes of no
tensor of the program (masks, positions), and numbers that it counts in (0-dim tensors), have data: Python may read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.names import tree_map
from onecard.comm.base.state import faked
from onecard.rules.call import Call, tensors_in
from onecard.rules.registry import find
from onecard.static.step import refusals
from onecard.static.step.facts import as_the_kernel_gives
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import is_elsewhere


class Sketch:
    """Runs operators without data.

    Args:
        had: whether a tensor was there before the step.
        about_to_write: is told of tensors with data that an operator is about to write to.

    Attributes:
        mode: makes the tensors without data.
    """

    def __init__(self, had: Callable[[Tensor], bool], about_to_write: Callable[[Sequence[Any]], None]) -> None:
        # In a world without data its own tensors have none: they are of one mode.
        self.mode: Any = nullcontext() if faked.here else _torch.fake_tensors()
        self._had, self._about_to_write = had, about_to_write
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self._real: dict[int, Tensor] = {}

    def without_data(self, x: Any) -> bool:
        """Whether a tensor has no data here."""
        return fakes.is_fake(x) or (isinstance(x, Tensor) and x.dim() > 0 and (self._had(x) or is_elsewhere(x)))

    def end(self) -> None:
        """The step is written down: what stands for its tensors, and keeps them, goes."""
        self._stand_ins.clear()
        self._real.clear()

    def of(self, x: Any) -> Any:
        """The stand-in of a tensor; anything else as it is."""
        if not isinstance(x, Tensor) or fakes.is_fake(x) or isinstance(x, DistTensor):
            return x
        if id(x) not in self._stand_ins:
            with self.mode:
                made = fakes.stand_in(x)
            self._stand_ins[id(x)] = x, made
            self._real[id(made)] = x
        return self._stand_ins[id(x)][1]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator: what it would give, where it has data; else its shape."""
        given = [*tensors_in((*args, *kwargs.values()))]
        if not any(map(self.without_data, given)):
            return func(*args, **kwargs)
        if not faked.here and not all(fakes.is_of(x, self.mode) for x in given):
            raise refusals.left_by_a_look(next(x for x in given if not fakes.is_of(x, self.mode)))
        with _untraced() if sys.gettrace() is not None else nullcontext():
            args, kwargs = tree_map(self.of, (tuple(args), dict(kwargs)))
            result = self._shaped(func, args, kwargs)
            if isinstance(result, tuple):
                result = as_the_kernel_gives(args, result)
            return tree_map(lambda x: self._real.get(id(x), x), result)

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator on tensors without data: as its row says, where torch's own function refuses what kernels
        do."""
        row = find(func)
        if row is not None and row.results is not None and len(func._schema.returns) == 1:
            with self.mode:
                return row.results(Call(func, args, kwargs))[0]
        if not faked.here and (known := self.mode.remembered(func, args, kwargs)) is not None:
            return known
        try:
            with self.mode:
                return func(*args, **kwargs)
        except fakes.values_needed() as why:
            raise refusals.reads_data(f"{func._schema.name} looks at its values") from why
        except ZeroDivisionError:  # torch divides by the number of elements of a loss, of which an empty part has none
            with self.mode:
                return torch.empty_like(args[1])

    def seen(self, x: Tensor) -> Tensor:
        """A tensor as operators are given it."""
        return self.of(x) if self.without_data(x) else x

    def writes(self, tensors: Sequence[Any]) -> None:
        """Tensors are about to be written to: those with data are. Generators are drawn from."""
        if not any(map(self.without_data, tensors)):
            self._about_to_write(tensors)


@contextmanager
def _untraced() -> Iterator[None]:
    """Inside, Python's code is torch's, and no part of the step that somebody follows."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)
