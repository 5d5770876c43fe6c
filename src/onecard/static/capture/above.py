"""What is seen above autograd: calls of torch's functions by the user's code, with the numbers that they are given."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onecard._torch.names import tree_leaves
from onecard.static.capture.recorder import Recorder
from onecard.static.guards.numbers import Number, numbers_in, plain
from onecard.static.step import refusals
from onecard.tensor.dist_tensor import DistTensor

_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_SPLITS = {torch.tensor_split, Tensor.tensor_split}
_PRINTS = {Tensor.__repr__, Tensor.__format__}
_LITERAL = (bool, int, float, complex, Tensor)
_FORWARD_ONLY = {torch.batch_norm, torch.nn.functional.batch_norm}  # their backward operators take no momentum
_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
_LOOKS = frozenset((
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "grad_fn", "is_leaf", "layout", "ndim", "requires_grad",
    "shape")), torch.is_complex, torch.is_floating_point, Tensor.dim, Tensor.is_complex,
    Tensor.is_floating_point, Tensor.numel, Tensor.size, Tensor.storage_offset, Tensor.stride,
))  # fmt: skip
"""What a tensor says of itself: no operator runs, and no number of the program goes in."""


class Above(TorchFunctionMode):
    """Gives torch ordinary floats in place of ``Number``s, and tells the recorder which ones a call was given."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        if not recorder.listens or (func in _LOOKS and not recorder.reads):
            return func(*args, **kwargs)
        recorder.calls += 1
        try:
            return self._called(func, args, kwargs)
        finally:
            recorder.calls -= 1

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        if func in _FROM_PYTHON and not all(isinstance(x, _LITERAL) for x in tree_leaves(args[0])):
            raise refusals.made_outside(torch.as_tensor(args[0]))
        if func in _READS:
            raise refusals.reads_data(f"{func.__name__}() gives its values to Python")
        if func in _SPLITS and any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values())):
            raise refusals.reads_data("tensor_split() takes its indices from it on the host (give them as a list)")
        if func in _PRINTS:
            with recorder.paused():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            raise refusals.swapped()
        tags = [*numbers_in(args), *numbers_in(kwargs)]
        if not tags:
            return self._plainly(func, args, kwargs)
        if func in _FROM_PYTHON and isinstance(args[0], Number):
            options = {"dtype": torch.get_default_dtype(), **kwargs}
            return self._tagged(torch.full, ((), args[0]), options, tags)
        return self._read(func, self._tagged(func, args, kwargs, tags))

    def _plainly(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call without ``Number``s. What torch reads of tensors for an operator that takes numbers is followed there."""
        recorder = self.recorder
        values = tree_leaves((args, kwargs))
        recorder.tags, recorder.matched, recorder.foreign = [], set(), False
        recorder.known = {0.0, 1.0, -1.0, *(x for x in values if type(x) is float)}
        try:
            result = func(*args, **kwargs)
        finally:
            tags, recorder.tags = recorder.tags, []
        if not recorder.foreign and not _differentiates(values):
            followed = {id(tag.node) for tag in tags if id(tag) in recorder.matched}
            recorder.reads = [(value, node) for value, node in recorder.reads if id(node) not in followed]
        return self._read(func, result)

    def _tagged(self, func: Any, args: Any, kwargs: Any, tags: list[Number]) -> Any:
        recorder = self.recorder
        values = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func not in _FORWARD_ONLY and _differentiates(values):
            # The backward operators take the number from autograd, where nobody can follow it.
            for tag in tags:
                float(tag)
            return func(*plain(args), **plain(kwargs))
        laid_out = [x for x in values if isinstance(x, DistTensor)]
        if laid_out and not any(x._spec.here for x in laid_out):  # on other ranks: here nothing is computed
            return func(*plain(args), **plain(kwargs))
        recorder.tags, recorder.matched, recorder.foreign = tags, set(), False
        recorder.known = {x for x in tree_leaves((args, kwargs)) if type(x) is float}
        try:
            result = func(*plain(args), **plain(kwargs))
        finally:
            recorder.tags = []
        for tag in tags:
            if recorder.foreign or id(tag) not in recorder.matched:
                float(tag)  # what torch makes of it cannot be told: it must stay what it is
        return result

    def _read(self, func: Any, result: Any) -> Any:
        """A counter that was read becomes a number; read in another way than by ``item()``, it must stay what it is."""
        recorder = self.recorder
        reads, recorder.reads = recorder.reads, []
        if func is Tensor.item and len(reads) == 1 and type(result) is float and not reads[0][1].meta["data"]:
            return Number(result, reads[0][1], recorder)
        for value, node in reads:
            recorder.condition(operator.eq, (node, value), True)
        return result


def _differentiates(values: Any) -> bool:
    """Whether autograd keeps something of a call on these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
