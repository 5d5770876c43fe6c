"""A world whose ranks are all in this process: each has its own World, random numbers and environment, and runs in turn."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from onecard import recorded
from onecard._torch.groups import JoinedGroups
from onecard.comm.base.state import World, carried
from onecard.comm.joined import group
from onecard.comm.joined.baton import Baton
from onecard.comm.joined.hub import Arrived, Hub, Told, hub
from onecard.machine.cost import Machine

Listener = Callable[[int, Told, Sequence[Tensor]], Arrived | None]
Around = Callable[[int], AbstractContextManager[Any]]


class _Store(dist.Store):
    """Where ranks leave each other words. Who finds none lets the others run first."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton, self._words = baton, dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._words[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self._baton.wait(lambda: key in self._words, f"the word {key!r}")
        return self._words[key]

    def add(self, key: str, amount: int) -> int:
        self._words[key] = str(int(self._words.get(key, b"0")) + amount).encode()
        return int(self._words[key])

    def check(self, keys: list[str]) -> bool:
        if not all(key in self._words for key in keys):
            self._baton.give_way()
        return all(key in self._words for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        known = self._words.get(key)
        if known == _bytes(expected) or (known is None and not expected):
            self._words[key] = _bytes(desired)
        return self._words.get(key, _bytes(expected))

    def delete_key(self, key: str) -> bool:
        return self._words.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._words)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._baton.wait(lambda: all(key in self._words for key in keys), f"the words {keys}")


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class _Rank:
    """What belongs to one rank, besides its thread: in force while it runs."""

    def __init__(
        self, size: int, rank: int, shared: Hub, store: _Store, priced: Machine | None, around: Around
    ) -> None:
        self.world = World(size, rank, priced, groups=JoinedGroups(size, rank, group.NAME, store))
        self.shared, self.around = shared, around(rank)
        self._environment: dict[str, str | None] = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        self._watched_by: tuple[Any, Any] = (None, None)
        self._numbers: Any = unseeded(rank)

    def enter(self) -> None:
        with ExitStack() as undo:  # all of it or nothing
            self._swap()
            undo.callback(self._swap)
            hub.here = self.shared  # the backend asks for it as the world makes its group of all
            undo.callback(setattr, hub, "here", None)
            self.world.__enter__()
            undo.callback(self.world.__exit__, None, None, None)
            hub.here, carried.here = self.shared, True
            self.around.__enter__()
            undo.pop_all()

    def leave(self) -> None:
        self.around.__exit__(None, None, None)
        self.world.__exit__(None, None, None)
        hub.here = None
        self._swap()

    def _swap(self) -> None:
        """Exchange what is this rank's for what was there."""
        now_by = recorded.recorder, recorded.watcher
        (recorded.recorder, recorded.watcher), self._watched_by = self._watched_by, now_by
        now = random.getstate(), _numpy()
        begin_unseeded(self._numbers)
        self._numbers = now
        for name, value in [*self._environment.items()]:
            self._environment[name] = os.environ.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def unseeded(rank: int) -> tuple[Any, Any]:
    """States of Python's and numpy's generators that a rank begins with: unlike torch's, each process has one of its own.

    Rank 0 has this process's, so that it is one card. Who seeds them on all ranks alike does not notice.

    Example:
        >>> unseeded(0)[0] == random.getstate(), unseeded(1)[0] == unseeded(1)[0], unseeded(1)[0] == unseeded(2)[0]
        (True, True, False)
    """
    numpy = _numpy()
    if not rank:
        return random.getstate(), numpy
    return random.Random(rank).getstate(), numpy and sys.modules["numpy"].random.RandomState(rank).get_state()


def begin_unseeded(numbers: tuple[Any, Any]) -> None:
    """Python's and numpy's generators go on from there."""
    random.setstate(numbers[0])
    if numbers[1] is not None:
        sys.modules["numpy"].random.set_state(numbers[1])


def _numpy() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def together(
    size: int,
    call: Callable[[int], Any],
    listener: Listener | None = None,
    machine: Machine | None = None,
    around: Around = lambda _: nullcontext(),
) -> list[Any]:
    """Run ``call(rank)`` on all ranks of a world in this process, one at a time; messages carry their values.

    A rank runs until it waits for another one. No sockets, no processes, no time-outs; each run is the same.

    Args:
        size: how many ranks there are.
        listener: is told of each message that a rank begins: (rank, what, its tensors); what it returns, of what arrives.
        machine: what messages and computations are priced with.
        around: for each rank a context that is entered as it begins to run and left as it stops, each time.

    Returns:
        What each rank returned.

    Raises:
        CommunicationError: ranks wait for each other in a circle, or bring different calls to one collective.
        BaseException: what the first rank that failed raised, with a note of its number.

    Example:
        >>> import torch, onecard as oc
        >>> def program(rank):
        ...     mesh = oc.ProcessMesh([0, 1], ["x"])
        ...     x = oc.shard_tensor(torch.arange(4.0), mesh, [oc.Shard(0)])
        ...     return x.to_local().tolist(), x.sum().item()
        >>> together(2, program)
        [([0.0, 1.0], 6.0), ([2.0, 3.0], 6.0)]
    """
    group.register()
    with grouped():
        return _together(size, call, listener, machine, around)


@contextmanager
def grouped() -> Iterator[None]:
    """Inside, a program that makes the group of all ranks finds that it is there."""
    with patch.object(dist, "init_process_group", _nothing), patch.object(dist, "destroy_process_group", _nothing):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _together(size: int, call: Callable[[int], Any], listener: Any, machine: Any, around: Around) -> list[Any]:
    ranks: list[_Rank] = []
    baton = Baton(size, lambda rank: ranks[rank].enter(), lambda rank: ranks[rank].leave())
    shared, store = Hub(baton), _Store(baton)
    shared.listener = listener
    ranks += [_Rank(size, rank, shared, store, machine, around) for rank in range(size)]
    return baton.run(call)
