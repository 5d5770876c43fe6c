"""What a loss divides by, seen while it runs: numbers that are computed from its labels alone, and can be for other labels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecard._torch.modes import DispatchMode
from onecard._torch.names import OpOverload, tree_leaves, tree_map
from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten
_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_DIVISIONS = (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.mul_.Tensor)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_CUTS = (aten.slice.Tensor, aten.narrow.default)
_MEAN = 1


class Unknown(Exception):
    """A number that cannot be computed for other labels."""


@dataclass(eq=False)
class Made:
    """A tensor that depends on the labels alone: one of them, or what an operator made of such."""

    function: Callable[..., Any] | None
    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    rows: int = 0
    """The first dim of what it was made of."""

    def value(self, labels: Sequence[Any], known: dict[Made, Any] | None = None) -> Any:
        """It, of other labels.

        Raises:
            Unknown: it was computed for the number of rows that was seen, or for other reasons fits no other.
        """
        known = {} if known is None else known
        if self not in known:
            if self.function is None:
                known[self] = labels[self.args]
            else:
                given = tree_map(
                    lambda x: x.value(labels, known) if isinstance(x, Made) else x, (self.args, self.kwargs)
                )
                known[self] = self._run(*given)
        return known[self]

    def _run(self, args: Any, kwargs: Any) -> Any:
        function: Any = self.function
        if function in _SIZED and self.rows and args[1] and args[1][0] > 0:  # the first dim has the rows
            args = (args[0], [args[1][0] * args[0].shape[0] // self.rows, *args[1][1:]])
        if function in _VIEWS:  # rows of labels may lie apart, as those of ids[:, 1:] do
            function = torch.reshape
        if isinstance(function, OpOverload) and function._schema.is_mutable:
            args = (args[0].clone(), *args[1:])
        try:
            return function(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as fault:
            raise Unknown(str(fault)) from fault


def _total(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What torch's loss of classes divides by."""
    valid = target != ignored
    if weight is None:
        return valid.sum()
    each = weight.to(target.device)[torch.where(valid, target, 0)]  # a choice by the mask is not in a recording
    return torch.where(valid, each, 0).sum()


def _inverse(x: Tensor) -> Tensor:
    return 1 / x


class Trace(DispatchMode):
    """Runs a loss, and notes what it divides by.

    Attributes:
        divisors: numbers that are made of the labels alone, and how many elements labels choose, by which a mean divides.
        blind: why there may be others that cannot be seen; "" if there are none.
        chooses: why rows that are not the labels' may decide how many elements count, which matters unless it is a sum.
    """

    def __init__(self, values: Any, labels: Any) -> None:
        super().__init__()
        self.divisors: list[Made] = []
        self.blind = self.chooses = ""
        self._read: list[float] = []
        self._held: list[Any] = []  # so that identities stay theirs
        self._made: dict[int, Made] = {}
        self._of_values: set[int] = set()
        for x in tree_leaves(values):
            self._note(x, None)
        for i, x in enumerate(tree_leaves(labels)):
            if isinstance(x, Tensor):
                self._note(x, Made(None, i))

    def _note(self, x: Any, made: Made | None) -> None:
        if isinstance(x, Tensor):
            self._held.append(x)
            self._made.pop(id(x), None)
            if made is None:
                self._of_values.add(id(x))
            else:
                self._made[id(x)] = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        of_values = any(id(x) in self._of_values for x in given)
        of_labels = any(id(x) in self._made for x in given)
        self._look(func, args, of_values)
        result = func(*args, **kwargs)
        self._choose(func, args)
        if of_labels and func is aten._local_scalar_dense.default:
            self._read.append(float(result))
        if of_values or (of_labels and any(isinstance(x, DistTensor) for x in given)):
            for x in tree_leaves(result):
                self._note(x, None)
        elif of_labels:
            if func in _CUTS and any(n in self._read for n in args[2:] if isinstance(n, int) and n > 1):
                self.blind = "labels that are cut by a number that was read from them in Python (labels[:, : int(n)])"
            link = lambda x: self._made.get(id(x), x) if isinstance(x, Tensor) else x  # noqa: E731
            rows = given[0].shape[0] if given[0].dim() else 0
            made = Made(func, tree_map(link, args), tree_map(link, kwargs), rows)
            if isinstance(result, Tensor):
                self._note(result, made)
            else:
                for i, x in enumerate(result if isinstance(result, tuple | list) else ()):
                    self._note(x, Made(operator.getitem, (made, i)))
        return result

    def _look(self, func: Any, args: Any, of_values: bool) -> None:
        """Whether this call divides, and by what."""
        if func in _NLL and of_values and args[3] == _MEAN:
            _, target, weight, _, ignored = args
            if (known := self._made.get(id(target))) is None:
                self.blind = "labels that are not those that it is given, or are marked within it"
            else:
                self.divisors.append(Made(_total, (known, weight, ignored)))
        elif func in (*_DIVISIONS, *_PRODUCTS):
            for by in args[1:2] if func in _DIVISIONS else args[:2]:
                self._divided(by, func in _PRODUCTS)

    def _choose(self, func: Any, args: Any) -> None:
        """Whether this call chooses elements, and whose values say how many."""
        if func is aten.topk.default and id(args[0]) in self._of_values and args[0].dim() == 1:
            self.blind = "rows that topk() takes from all"
        masks = {aten.index.Tensor: args[1:2], aten.masked_select.default: args[1:2], aten.nonzero.default: args[:1]}
        for mask in tree_leaves(masks.get(func, ())):
            if not isinstance(mask, Tensor) or (func is not aten.nonzero.default and mask.dtype is not torch.bool):
                continue
            if (known := self._made.get(id(mask))) is not None:
                self.divisors.append(Made(torch.count_nonzero, (known,)))
            elif id(mask) in self._of_values:
                self.chooses = "a number of elements that is decided by what the model returns"

    def _divided(self, by: Any, is_product: bool) -> None:
        known = self._made.get(id(by)) if isinstance(by, Tensor) else None
        if isinstance(by, Tensor) and by.dim():
            return
        if known is not None:
            self.divisors.append(Made(_inverse, (known,)) if is_product else known)
        elif is_product:
            return
        elif isinstance(by, Tensor) and id(by) in self._of_values:
            self.blind = "a number that is computed from what the model returns"
        elif not (isinstance(by, Tensor) and by.is_meta) and float(by) != 1 and float(by) in self._read:
            self.blind = "a number that was read from the labels in Python (.item(), int(), float())"
