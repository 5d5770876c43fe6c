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
_MULTIPLY = {
    Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul, torch.multiply,
    Tensor.div, Tensor.div_, Tensor.divide, Tensor.true_divide, Tensor.__truediv__, Tensor.__itruediv__, Tensor.__rtruediv__,
    torch.div, torch.divide, torch.true_divide,
}  # fmt: skip
"""Whose backward operators are given the number as it is."""
_ADD = {
    Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add, torch.sub, torch.subtract,
    Tensor.sub, Tensor.sub_, Tensor.subtract, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, torch.rsub,
}  # fmt: skip
"""Whose backward operators need no number."""
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
        tags = numbers_in((args, kwargs))
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
        kept = func not in _FORWARD_ONLY and _differentiates(values)
        if kept and (func not in _MULTIPLY | _ADD or kwargs):
            # The backward operators take the number from autograd, where nobody can follow it.
            for tag in tags:
                float(tag)
            return func(*plain(args), **plain(kwargs))
        laid_out = [x for x in values if isinstance(x, DistTensor)]
        if laid_out and not any(x._spec.here for x in laid_out):  # on other ranks: here nothing is computed
            return func(*plain(args), **plain(kwargs))
        with _Followed(recorder, tags, {x for x in tree_leaves((args, kwargs)) if type(x) is float}):
            result = func(*plain(args), **plain(kwargs))
        if kept and func in _MULTIPLY:
            _in_backward(result.grad_fn, recorder, tags)
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


class _Followed:
    """While operators run that are given these numbers. What torch makes of them otherwise must stay what it is."""

    def __init__(self, recorder: Recorder, tags: list[Number], known: set[float]) -> None:
        self.recorder, self.tags, self.known = recorder, tags, known

    def __enter__(self) -> None:
        recorder = self.recorder
        self._before = recorder.tags, recorder.matched, recorder.foreign, recorder.known
        recorder.tags, recorder.matched, recorder.foreign, recorder.known = self.tags, set(), False, self.known

    def __exit__(self, kind: Any, *fault: Any) -> None:
        recorder = self.recorder
        matched, foreign = recorder.matched, recorder.foreign
        recorder.tags, recorder.matched, recorder.foreign, recorder.known = self._before
        for tag in self.tags if kind is None else ():
            if foreign or id(tag) not in matched:
                float(tag)


def _in_backward(node: Any, recorder: Recorder, tags: list[Number]) -> None:
    """The number that a node of autograd keeps is followed where it hands it to its operators.

    Not of what is written to a part of another tensor, nor under ``torch.func``: the node that keeps it is not at hand.
    """
    under_way: list[_Followed] = []
    if type(node).__name__.removesuffix("Backward0") not in ("Mul", "Div"):
        for tag in tags:
            float(tag)
        return

    def begin(grads: Any) -> None:
        if torch.is_grad_enabled():  # their own graph keeps it once more
            for tag in tags:
                float(tag)
        elif recorder.listens:
            under_way.append(_Followed(recorder, tags, set()))
            under_way[-1].__enter__()

    def end(grads: Any, given: Any) -> None:
        if under_way:
            under_way.pop().__exit__(None)

    node.register_prehook(begin)
    node.register_hook(end)


def _differentiates(values: Any) -> bool:
    """Whether autograd keeps something of a call on these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
