"""torch.distributed's own state, exchanged: as ``_torch`` private names of torch, all of them here."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

_make_group = dist.init_process_group  # whatever a program finds in its place
_C10D = "torch.distributed.distributed_c10d"


class FakeGroups:
    """torch.distributed's own state as one of so many ranks, from torch's own tests: its groups send nothing. Entered and left
    any number of times, before or beside real groups, which it does not touch."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._mine: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        c10d: Any = import_module(_C10D)
        self._outer = c10d._world, sys.excepthook  # which making a group of all changes
        _show(self._outer[0], False)
        try:
            if self._mine is None:
                self._mine = c10d._world = _empty(self._outer[0])
                self._begin()
            else:
                _show(self._mine, True)
                c10d._world = self._mine
                c10d._update_default_pg(self._mine.default_pg)
        except BaseException:
            self.__exit__()
            raise

    def _begin(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", rank=self.rank, world_size=self.size, store=FakeStore())

    def __exit__(self, *fault: Any) -> None:
        c10d: Any = import_module(_C10D)
        _show(c10d._world, False)
        c10d._world, sys.excepthook = self._outer
        c10d._update_default_pg(c10d._world.default_pg)
        _show(c10d._world, True)


def _empty(like: Any) -> Any:
    """What torch keeps of its groups, without any."""
    names = [name for name, member in vars(type(like)).items() if isinstance(member, property)]
    found = vars(like) if not names else {name: getattr(like, name) for name in names if name != "pg_config_info"}
    return SimpleNamespace(**{name: None if name == "default_pg" else type(v)() for name, v in found.items()})


def _show(world: Any, there: bool) -> None:
    """Whether functional collectives find the groups of a world by their names: two worlds may use the same ones."""
    c10d: Any = import_module(_C10D)
    for group, name in world.pg_names.items():
        if there:
            c10d._register_process_group(name, group)
        else:
            c10d._unregister_process_group(name)


class JoinedGroups(FakeGroups):
    """The same of one rank of a world whose ranks are all in this process: its groups are of a backend, and meet in a store."""

    def __init__(self, size: int, rank: int, backend: str, store: Any) -> None:
        super().__init__(size, rank)
        self._backend, self._store = backend, store

    def _begin(self) -> None:
        _make_group(self._backend, rank=self.rank, world_size=self.size, store=self._store)
