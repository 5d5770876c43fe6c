"""Hooks of parameters, in a step of microbatches: called once, with the gradient of the batch, as on one card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch


@contextmanager
def hooks_wait(parameters: Iterable[Any], whole: Callable[[list[Any]], Any] = lambda _: None) -> Iterator[None]:
    """Inside, gradients are added up unseen by the program's hooks of these parameters; at the end those are called.

    A hook that clips, or one that counts, or steps, after the gradient is accumulated would see each microbatch's part.

    Args:
        whole: makes the gradients of some parameters whole, where other ranks have summands of them.
    """
    hooked = [_Hooked(p, whole) for p in dict.fromkeys(parameters) if p.requires_grad and _users_hooks(p)]
    try:
        yield
    except BaseException:
        for each in hooked:
            each.put_back()
        raise
    for each in hooked:
        each.call()


class _Hooked:
    """A parameter whose hooks wait, and the gradient that it had."""

    def __init__(self, p: Any, whole: Callable[[list[Any]], Any]) -> None:
        self.p, self.whole = p, whole
        self.kept = [(known, dict(known), _users_hooks(p, known)) for known in _hooks_of(p)]
        self.before: Tensor | None = None
        if _torch.gradient(p) is not None:
            whole([p])
            self.before, p.grad = p.grad, None
        for known, _, mine in self.kept:
            for key in mine:
                del known[key]

    def put_back(self) -> None:
        """The hooks, in the order that they had."""
        for known, all_of_them, _ in self.kept:
            known.clear()
            known.update(all_of_them)
        if self.before is not None:
            self.p.grad = self.before

    @torch.no_grad()
    def call(self) -> None:
        """The hooks on the gradient of the step, and those after it has been added to what there was."""
        p, before = self.p, self.before
        self.whole([p])
        grad, self.before = p.grad, None
        self.put_back()
        if grad is None:
            p.grad = before
            return
        (_, calls, mine), (_, later, after) = self.kept
        for key in mine:
            found = calls[key](grad)
            grad = grad if found is None else found
        p.grad = grad if before is None else before + grad
        for key in after:
            later[key](p)


def _hooks_of(p: Any) -> list[dict[int, Any]]:
    """The hooks of a leaf, as torch reads them: those on what is added to its gradient, and those after it."""
    return [p._backward_hooks or {}, getattr(p, "_post_accumulate_grad_hooks", None) or {}]


def _users_hooks(p: Any, among: dict[int, Any] | None = None) -> list[int]:
    """The keys of those that are not this package's own."""
    every = _hooks_of(p) if among is None else [among]
    return [key for each in every for key, call in each.items() if not is_ours(call)]


def is_ours(call: Any) -> bool:
    """Whether a hook is this package's own."""
    return str(getattr(getattr(call, "func", call), "__module__", "")).startswith("onecard.")
