"""Gradients of rows: what a pass of autograd gives for values that have a row for each row of the batch.

A mean over the batch gives each row a share that falls as the batch grows, so that a microbatch's gradients of its rows are
larger than the batch's: of degree -1 (``Kind``). They are no summands of one gradient, as those of parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onecard.static.passes.dependence import ADDS, MIXED, ROWS, UNKNOWN, Kind


class Passes(TorchFunctionMode):
    """Tells what each pass of autograd gives.

    Args:
        kind_of: what is known of a tensor; keep: takes what is known of a gradient.
        known: the tensors of which something is known.

    Attributes:
        aside: whether a pass runs whose gradients are those of rows alone, so that it is no loss of the parameters.
        rows: the gradients of rows.
    """

    def __init__(
        self,
        kind_of: Callable[[Tensor], Kind | None],
        keep: Callable[[Tensor, Kind], None],
        known: Callable[[], Iterator[Tensor]],
    ) -> None:
        super().__init__()
        self.kind_of, self.keep, self.known = kind_of, keep, known
        self.aside, self.rows = False, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            begins = self._begins([args[0]], [args[1] if len(args) > 1 else kwargs.get("gradient")])
            result = func(*args, **kwargs)
            leaves = [x for x in self.known() if x.requires_grad and (x.is_leaf or x.retains_grad)]
            self._note(begins, leaves, [x.grad for x in leaves], False)
            return result
        if func is not torch.autograd.grad:
            return func(*args, **kwargs)
        outputs, inputs = (_many(args[i] if len(args) > i else kwargs[n]) for i, n in enumerate(("outputs", "inputs")))
        begins = self._begins(outputs, _many(args[2] if len(args) > 2 else kwargs.get("grad_outputs")))
        before, self.aside = self.aside, all(_has_rows(self.kind_of(x)) for x in inputs)
        try:
            result = func(*args, **kwargs)
        finally:
            self.aside = before
        self._note(begins, inputs, result, bool(kwargs.get("create_graph")))
        return result

    def _begins(self, outputs: Sequence[Tensor], given: Sequence[Any]) -> Kind | None:
        """What is differentiated, as a value that all rows give together."""
        kinds = [self.kind_of(x) for x in outputs]
        seeds = [self.kind_of(x) if isinstance(x, Tensor) else None for x in (*given, *[None] * len(outputs))]
        found = []
        for kind, seed in zip(kinds, seeds, strict=False):
            if kind is not None and kind.how == ROWS:
                more = seed.degree if seed is not None and seed.how == ROWS else 0
                found.append(Kind(ADDS, degree=kind.degree + more + 1, where=kind.where, learns=True))
            elif kind is not None and kind.how in (ADDS, MIXED, UNKNOWN):
                found.append(kind)
        bad = [k for k in found if k.how != ADDS or k.degree != found[0].degree]
        return None if not found else replace(bad[0], how=MIXED) if bad else found[0]

    def _note(self, begins: Kind | None, inputs: Sequence[Tensor], found: Sequence[Any], again: bool) -> None:
        for x, grad in zip(inputs, found, strict=True):
            kind = self.kind_of(x)
            if begins is None or not isinstance(grad, Tensor):
                continue
            if kind is not None and kind.how == ROWS:
                self.rows.append(grad)
                lost = begins.how != ADDS
                self.keep(grad, begins if lost else replace(kind, degree=begins.degree - 1 - kind.degree, learns=True))
            elif kind is None and again:  # of parameters, as values that a loss is made of
                self.keep(grad, replace(begins, learns=True))


def _has_rows(kind: Kind | None) -> bool:
    return kind is not None and kind.how == ROWS


def _many(x: Any) -> Sequence[Any]:
    return x if isinstance(x, list | tuple) else [x]
