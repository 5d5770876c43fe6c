"""Which ranks share a host: each says its own in the rendezvous' store, once, when a transfer between meshes needs it."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

import torch.distributed as dist

from onecard.comm.base import attempt
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.moves.transfer import Hosts

_KEY = "host"
_known: Kept[dict[int, str]] = Kept(dict)


def among(ranks: Collection[int]) -> Hosts:
    """The given ranks grouped by host; () where they share one. Every one of them calls it; others learn nothing.

    Raises:
        CommunicationError: one of the ranks does not come within ``ONECARD_TIMEOUT``.
    """
    me, everywhere = world.get_rank(), str(world.get_world_size())
    if me not in ranks or os.environ.get("LOCAL_WORLD_SIZE", "") == everywhere or everywhere == "1":
        return ()
    world.init()
    if dist.get_backend() == "fake":
        return ()
    _learn(me, ranks)
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        hosts.setdefault(_known.here[rank], []).append(rank)
    return tuple(map(tuple, hosts.values())) if len(hosts) > 1 else ()


def name() -> str:
    """This process's host: the number that the launcher gave the machine, or else its name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def forget() -> None:
    """Forget the hosts (with the process group)."""
    _known.here.clear()


def _learn(me: int, ranks: Collection[int]) -> None:
    store = attempt.store()
    if me not in _known.here:
        _known.here[me] = name()
        store.set(f"{_KEY}/{me}", _known.here[me])
    missing = [rank for rank in sorted(ranks) if rank not in _known.here]
    if not missing:
        return
    keys = [f"{_KEY}/{rank}" for rank in missing]
    try:
        store.wait(keys, world.TIMEOUT)
    except (RuntimeError, dist.DistError) as fault:
        gone = [rank for rank, key in zip(missing, keys, strict=True) if not store.check([key])]
        raise CommunicationError(
            f"rank {me} moves a tensor between meshes with ranks {sorted(ranks)}, but rank(s) {gone} did not come within "
            f"{world.TIMEOUT.total_seconds():.0f} s. Every rank of both meshes must make this call: take it out of any "
            "branch on the rank"
        ) from fault
    _known.here.update(zip(missing, (store.get(key).decode() for key in keys), strict=True))
