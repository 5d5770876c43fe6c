"""What is known of a gradient: whether it is still this rank's summand, and over whom it is to be summed.

This depends on the program and not on the rank, or ranks would disagree about which messages are due: a backward makes all
gradients of a family unknown, also those that only another rank has.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.issue.ranks import Ranks

_NAME = "_onecard_summed"
Words = tuple[bool, ...]
read, write = _torch.gradient, _torch.set_gradient
"""A gradient as autograd left it."""


class Family:
    """Parameters whose gradients are summed together when one of them is read."""

    def __init__(self, members: Iterable[Tensor] = ()) -> None:
        self.backwards = 0  # how often backward has added to any
        self.task = -1  # the backward at whose end they are summed
        self.become(members)

    def become(self, members: Iterable[Tensor]) -> None:
        """The model has other parameters now."""
        self._members = [weakref.ref(p) for p in members]

    def members(self) -> list[Tensor]:
        """Those that are still there."""
        return [p for known in self._members if (p := known()) is not None and of(p) is not None]

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
        name: of the parameter in its model.
        trained: it was no frozen one when its gradient was last summed.
        looked: the program has read it since, so that what it assigns is made of the whole.
        asked: so it is of the gradient that ``torch.autograd.grad`` has given it.
        placed: the gradient, where the program has put it into a tensor of its own: one buffer of all gradients.
    """

    __slots__ = (
        "__weakref__",
        "asked",
        "data",
        "dtype",
        "family",
        "hooked",
        "kept",
        "known",
        "looked",
        "name",
        "placed",
        "rest",
        "summand",
        "trained",
        "uneven",
        "wide",
    )

    def __init__(self, family: Family | None) -> None:
        self.data: Ranks | None = None
        self.rest: Ranks | None = None
        self.family = family
        self.summand = self.uneven = self.looked = self.hooked = self.asked = self.trained = False
        self.kept: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.wide: Tensor | None = None
        self.placed: Tensor | None = None
        self.known, self.name = -1, ""

    def is_unknown(self) -> bool:
        """Whether a backward has run since it was whole."""
        return self.family is not None and self.known != self.family.backwards

    def is_whole(self) -> None:
        """It is, from now on."""
        self.summand = self.uneven = False
        if self.family is not None:
            self.known = self.family.backwards

    def words(self, there: bool) -> Words:
        """What it is now, as data; ``there``: whether there is a gradient. Else nobody has looked at one."""
        kept, wide = self.kept is not None, self.wide is not None
        looked = self.looked and (there or kept or wide)
        return self.summand, self.uneven, self.is_unknown(), looked, self.asked, kept, wide

    def noted(self) -> tuple[Any, ...]:
        """All of it, for who takes back what comes now."""
        return (
            *(getattr(self, name) for name in _HELD),
            self.family,
            None if self.family is None else self.family.backwards,
        )

    def back(self, noted: tuple[Any, ...]) -> None:
        """It is what was noted."""
        for name, value in zip(_HELD, noted, strict=False):
            setattr(self, name, value)
        *_, self.family, backwards = noted
        if self.family is not None:
            self.family.backwards = backwards

    def resume(self, words: Words) -> None:
        """It is what these words say; the tensors have been put where they belong."""
        self.summand, self.uneven, unknown, self.looked, self.asked = words[:5]
        if self.family is not None:
            self.known = -1 if unknown else self.family.backwards

    def widen(self, p: Tensor) -> None:
        """Add what there is to what has added up in another dtype."""
        grad = read(p)
        if grad is None or grad.is_sparse:
            return
        self.wide = grad.to(self.dtype) if self.wide is None else self.wide.add_(grad)
        write(p, None)

    def place(self, value: Tensor | None) -> None:
        """This is the gradient now, and perhaps a part of a tensor in which the program sees it without asking for it."""
        self.placed = value if value is not None and is_part(value) else None

    def put(self, p: Tensor, total: Tensor) -> None:
        """The whole gradient stands where the program looks for it."""
        write(p, total if self.placed is None else self.placed.copy_(total))

    def assign(self, before: Tensor | None, value: Tensor | None) -> None:
        """The program has put another gradient in its place."""
        self.kept = self.wide = None
        self.place(value)
        if value is None:
            self.is_whole()
        elif self.asked:
            self.is_whole()
            self.uneven = True
        elif before is None or self.is_unknown() or not self.looked:
            self.summand = self.uneven = True  # made of one rank's data
            self.known = -1
        else:
            self.uneven = True  # made of the whole one: equal on all ranks, or an average is wanted

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _references(p: Tensor) -> int:
    known = read(p)
    return sys.getrefcount(known)


@functools.lru_cache(maxsize=1)
def _of_nobody() -> int:
    """References to a gradient that nobody but its parameter has."""
    p = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    write(p, torch.zeros(1, device="cpu"))
    return _references(p)


def is_held(p: Tensor) -> bool:
    """Whether the program has a gradient at hand, beside the parameter that has it: in a list that it made of all once."""
    return read(p) is not None and _references(p) > _of_nobody()


def is_part(x: Tensor) -> bool:
    """Whether its memory is another tensor's, too."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    return x._base is not None or x.untyped_storage().nbytes() > x.numel() * x.element_size()


_HELD = ("summand", "uneven", "known", "looked", "asked", "hooked", "trained", "kept", "wide")


def _nothing() -> None:
    """What is left of it in a file."""


def of(p: Any) -> Summed | None:
    """What is known of a parameter's gradient; None where no other rank has a part in it."""
    return getattr(p, _NAME, None)


def watched(p: Any) -> Summed | None:
    """What is known of a gradient, if who reads it has it summed first."""
    state = of(p)
    return None if state is None or state.family is None else state


def words_now(parameters: Sequence[Any], states: Sequence[Summed]) -> list[Words]:
    """What is known of the gradients of parameters, as data."""
    return [state.words(read(p) is not None) for p, state in zip(parameters, states, strict=True)]


def replayed(states: Sequence[Summed], words: Sequence[Words], reached: Sequence[bool]) -> None:
    """A recorded step was replayed, and has left what these words say; ``reached``: whether a backward added to their family."""
    for family in {state.family for state, is_reached in zip(states, reached, strict=True) if is_reached}:
        family.backwards += 1  # type: ignore[union-attr]
    for state, said in zip(states, words, strict=True):
        state.resume(said)


def is_due(p: Tensor) -> bool:
    """Whether backward may have brought a gradient since the last sum: of one that is frozen since, too."""
    state = of(p)
    return p.requires_grad or (state is not None and (state.trained or state.summand))


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


def stepped(parameters: Iterable[Tensor]) -> None:
    """An optimizer has read them, which was not the program's doing."""
    for p in parameters:
        state = of(p)
        if state is not None:
            state.looked = state.asked = False
