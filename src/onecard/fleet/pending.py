"""Which gradients are still this rank's summands. Whoever reads ``p.grad`` of such a parameter has them summed first.

Backward leaves what it made in the gradient, as on one card, and sends nothing. ``Tensor.grad`` is a property here: reading it
sums what is pending in the parameter's family, that is in its model. So no line between ``backward()`` and ``step()``, the
optimizer's own included, sees one rank's gradient. What is known of a gradient depends on the program and not on the rank, or
ranks would disagree about which messages are due: a backward makes all gradients of a family unknown, also those that only
another rank has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard import _torch
from onecard.comm.ranks import Ranks

_NAME = "_onecard_summed"
read, write = _torch.gradient, _torch.set_gradient
"""A gradient as autograd left it."""


class Family:
    """Parameters whose gradients are summed together when one of them is read."""

    def __init__(self, members: Iterable[Tensor] = ()) -> None:
        self.backwards = 0  # how often backward has added to any
        self.become(members)

    def become(self, members: Iterable[Tensor]) -> None:
        """The model has other parameters now."""
        self._members = [weakref.ref(p) for p in members]

    def members(self) -> list[Tensor]:
        """Those that are still there."""
        return [p for known in self._members if (p := known()) is not None and of(p) is not None]

    def look(self, p: Tensor) -> None:
        """Somebody reads a gradient: sum what is pending."""
        from onecard.fleet.gradients import sync

        # Within a backward the others' are not made yet.
        sync([p] if _torch.in_backward() else [q for q in self.members() if of(q).is_unknown()])  # type: ignore[union-attr]

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


class Summed:
    """What is known of a parameter's gradient.

    Attributes:
        data: the ranks that hold copies and see other data.
        rest: those over which it is averaged where an optimizer averages over the others itself.
        family: None: it is not watched (a distributed parameter's is summed by its own means).
        summand: other ranks have summands of what it is now.
        uneven: it may differ between ranks that see other data.
        kept: what was whole before backward added to it.
        hooked: what backward is about to add is whole already.
        dtype: in which summands add up, if not in the parameter's.
        wide: what they have added up to in it.
        looked: the program has read it since, so that what it assigns is made of the whole.
    """

    __slots__ = (
        "__weakref__",
        "data",
        "dtype",
        "family",
        "hooked",
        "kept",
        "known",
        "looked",
        "rest",
        "summand",
        "uneven",
        "wide",
    )

    def __init__(self, family: Family | None) -> None:
        self.data: Ranks | None = None
        self.rest: Ranks | None = None
        self.family = family
        self.summand = self.uneven = self.looked = self.hooked = False
        self.kept: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.wide: Tensor | None = None
        self.known = -1

    def is_unknown(self) -> bool:
        """Whether a backward has run since it was whole."""
        return self.family is not None and self.known != self.family.backwards

    def is_whole(self) -> None:
        """It is, from now on."""
        self.summand = self.uneven = False
        if self.family is not None:
            self.known = self.family.backwards

    def widen(self, p: Tensor) -> None:
        """Add what there is to what has added up in another dtype."""
        grad = read(p)
        if grad is None or grad.is_sparse:
            return
        self.wide = grad.to(self.dtype) if self.wide is None else self.wide.add_(grad)
        write(p, None)

    def assign(self, before: Tensor | None, value: Tensor | None) -> None:
        """The program has put another gradient in its place."""
        self.kept = self.wide = None
        if value is None:
            self.is_whole()
        elif before is None or self.is_unknown() or not self.looked:
            self.summand = self.uneven = True  # made of one rank's data
            self.known = -1
        else:
            self.uneven = True  # made of the whole one: equal on all ranks, or an average is wanted

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """What is left of it in a file."""


def of(p: Any) -> Summed | None:
    """What is known of a parameter's gradient; None where no other rank has a part in it."""
    return getattr(p, _NAME, None)


def watch(p: Tensor, family: Family | None = None) -> Summed:
    """Begin to know of a parameter's gradient; ``family``: that of its model."""
    state = watch_alike(p)
    if state.family is None:
        state.family = Family([p])
        state.summand = state.uneven = read(p) is not None
        state.known = -1 if state.summand else 0
        _hook(p)
    if family is not None and family is not state.family:
        state.known = -1 if state.is_unknown() else family.backwards
        state.family = family
    return state


def watch_alike(p: Tensor) -> Summed:
    """Where a parameter's data are, and nothing else: no other rank has a part in it, or it is summed by other means."""
    state = of(p)
    if state is None:
        state = Summed(None)
        setattr(p, _NAME, state)
    return state


def leave(p: Tensor) -> None:
    """Its gradient goes to a distributed parameter's."""
    state = of(p)
    if state is not None:
        state.family = None


def _hook(p: Tensor) -> None:
    if not (p.is_floating_point() or p.is_complex()) or not p.is_leaf:
        return
    trained = p.requires_grad
    p.requires_grad_(True)  # one that is frozen now may be trained later
    me = weakref.ref(p)
    _torch.hook_first(p, lambda grad: _before(me(), grad))
    p.register_post_accumulate_grad_hook(_after)
    p.requires_grad_(trained)


def _before(p: Any, grad: Tensor) -> Tensor | None:
    """Backward is about to add a summand: what is whole already is put aside, where a sum of both would count it often."""
    from onecard.fleet.gradients import adds_up, whole

    state, known = of(p), read(p)
    if state is None or state.family is None:
        return None
    if _torch.has_hooks_beside(p):  # which see the whole one, as on one card: a clipping of a summand is none
        state.hooked = True
        return whole(p, grad)
    if known is not None and state.dtype is not None and state.summand:
        state.widen(p)
    elif known is not None and not state.summand and (state.dtype is not None or not adds_up(p)):
        state.kept = known
        write(p, None)
        _torch.queue_callback(partial(_back, weakref.ref(p)))
    return None


def _back(known: Any) -> None:
    """The end of a backward that added nothing (``torch.autograd.grad``)."""
    p = known()
    state = of(p)
    if state is not None and state.kept is not None and state.wide is None and read(p) is None:
        write(p, state.kept)
        state.kept = None


def _after(p: Tensor) -> None:
    state = of(p)
    if state is not None:
        if state.dtype is not None and not state.hooked:
            state.widen(p)
        state.summand, state.uneven = (state.summand, state.uneven) if state.hooked else (True, True)
        state.looked = state.hooked = False
        if state.family is not None:
            state.family.backwards += 1


def _get(x: Tensor) -> Tensor | None:
    state = of(x)
    if state is not None:
        if state.is_unknown():
            state.family.look(x)  # type: ignore[union-attr]
        state.looked = True
    return read(x)


def _set(x: Tensor, value: Tensor | None) -> None:
    state = of(x)
    before = None if state is None else read(x)
    write(x, value)
    if state is not None:
        state.assign(before, value)


def stepped(parameters: Iterable[Tensor]) -> None:
    """An optimizer has read them, which was not the program's doing."""
    for p in parameters:
        state = of(p)
        if state is not None:
            state.looked = False


def install() -> None:
    """Once a process."""
    if not isinstance(torch.Tensor.grad, property):
        torch.Tensor.grad = property(_get, _set, lambda x: _set(x, None), "See torch.")  # type: ignore[assignment]
