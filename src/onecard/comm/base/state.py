"""World: what a process knows of itself and of the others, as one value that is made, entered, left and dropped.

A module of ``comm``, ``tensor`` or ``parallel`` that remembers something of this rank declares it once, as a ``Kept``; what
is there now is its ``here``. Entering another world gives every ``Kept`` that world's value, so that nothing of one world
is found in another: programs and specs hold for one rank, groups and counts for one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from onecard._torch import groups as _torch_groups
from onecard._torch import names as _torch
from onecard.errors import CommunicationError
from onecard.machine.cost import MACHINE, Machine

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Something that each world has of its own: ``here`` is that of the present one, ``make`` makes another world's.

    Example:
        >>> notes = Kept(list)
        >>> notes.here.append("of the real world")
        >>> with World(4, rank=3):
        ...     notes.here
        []
        >>> notes.here
        ['of the real world']
        >>> kept.remove(notes)
    """

    __slots__ = ("here", "make")
    here: Value

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make, self.here = make, make()
        kept.append(self)

    @contextmanager
    def during(self, value: Value) -> Iterator[None]:
        """Inside, the present world has this one."""
        before, self.here = self.here, value
        try:
            yield
        finally:
            self.here = before

    def __bool__(self) -> bool:
        raise TypeError("a Kept is no value: read its .here")

    __iter__ = __len__ = __contains__ = None


kept: list[Kept[Any]] = []

home: Kept[object] = Kept(object)
"""Stands for the present world in what is made in it; ``REAL`` for that of the process itself."""
REAL = home.here

carried: Kept[bool] = Kept(bool)
"""Whether messages of the present world carry values though it is not the process's own: all its ranks are in this process."""


def arrives() -> bool:
    """Whether what is sent in the present world arrives: not where a rank is pretended alone."""
    return home.here is REAL or carried.here


faked: Kept[bool] = Kept(bool)
"""Whether all tensors of the present world are without data."""

unrecorded: Kept[bool] = Kept(bool)
"""Whether steps that would be recorded and replayed run as they are, because somebody looks at each operator."""

machine: Kept[Machine] = Kept(lambda: MACHINE)
"""What messages and computations are priced with: equal on all ranks, or they would decide otherwise than each other."""


class World:
    """One of ``size`` ranks. Entered (``with``) any number of times, it goes on with what it has decided so far.

    The world of the process itself has no size of its own: torch.distributed, or the environment, says which rank it is. Any
    other one is pretended: torch.distributed shows that rank, messages have no effect, so values mean nothing; shapes,
    layouts and messages are those of that rank. torch's random numbers go on in it, too, and stand where they stood
    after it.

    Raises:
        CommunicationError: no such rank, or the world is entered already.
    """

    __slots__ = ("_fakes", "_groups", "_outer", "_random", "_values", "rank", "size")

    def __init__(
        self, size: int, rank: int = 0, priced: Machine | None = None, fake: bool = False, groups: Any = None
    ) -> None:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (size, rank))
        if not whole or not 0 <= rank < size:
            raise CommunicationError(
                f"there is no rank {rank!r} in a world of {size!r}; its ranks count from 0: "
                f"onecard.pretend(world_size={max(size, rank + 1, 1) if whole else 8}, rank={max(rank, 0) if whole else 0})"
            )
        self.size, self.rank = size, rank
        self._groups = groups or _torch_groups.FakeGroups(size, rank)
        self._values: dict[Kept[Any], Any] = {faked: fake} if priced is None else {faked: fake, machine: priced}
        self._fakes: Any = _torch.fake_tensors() if fake else None
        self._random: Any = None
        self._outer: Any = None

    def __enter__(self) -> World:
        if self._outer is not None:
            raise CommunicationError(f"{self!r} is entered already: leave it first, or make another one")
        self._groups.__enter__()
        self._outer = {item: item.here for item in kept}, random_state()
        for item in kept:
            item.here = self._values.pop(item) if item in self._values else item.make()
        if self._random is not None:
            _set_random_state(self._random)
        if self._fakes is not None:
            self._fakes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fakes is not None:
            self._fakes.__exit__(kind, fault, trace)
        outer, state = self._outer
        self._values, self._random, self._outer = {item: item.here for item in kept}, random_state(), None
        for item in kept:  # one declared inside, by a module imported there, is new outside
            item.here = outer[item] if item in outer else item.make()
        _set_random_state(state)
        self._groups.__exit__(kind, fault, trace)

    def __repr__(self) -> str:
        return f"pretended rank {self.rank} of {self.size}"


def random_state() -> tuple[torch.Tensor, Any]:
    """That of torch's default generators: the CPU's, and those of GPUs where one is in use."""
    cuda = torch.cuda.get_rng_state_all() if "torch.cuda" in sys.modules and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[torch.Tensor, Any]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
