"""How many ranks each host has: with it a message between hosts is priced as one, and sums are cut inside a host first."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from onecard.comm.base.state import machine

_ALIKE = "hosts/each"


def learn(store: Any, rank: int, size: int) -> None:
    """Note in the present machine how many ranks a host has, if all have as many and ranks are counted host by host.

    Every rank of the world calls it, while they meet. On one host nothing is asked.

    Args:
        store: of the rendezvous.
    """
    mine = os.environ.get("LOCAL_WORLD_SIZE", "0")
    if mine == str(size) or machine.here.per_host or machine.here.links:
        return  # so on all ranks: a host that has all ranks is the only one
    told = (os.environ.get(name, "") for name in ("GROUP_RANK", "LOCAL_RANK"))
    each = int(mine) if mine.isdecimal() else 0
    in_order = each > 1 and list(told) == [str(rank // each), str(rank % each)]
    store.set(f"{_ALIKE}/{rank}", str(each if in_order else 0))
    if rank == 0:
        said = {store.get(f"{_ALIKE}/{other}") for other in range(size)}
        store.set(_ALIKE, said.pop() if len(said) == 1 else b"0")
    if found := int(store.get(_ALIKE)):
        machine.here = replace(machine.here, per_host=found)


__all__ = ["learn"]
