"""The backend "shm" of torch.distributed: its registration, its fallback, and what torch reserves for Gloo by name."""

from __future__ import annotations

import atexit
import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from onecard._torch import names as _torch
from onecard._torch import patches
from onecard.comm.base import attempt
from onecard.comm.base.warned import warn
from onecard.comm.shm import functional, futex, peers, rendezvous
from onecard.comm.shm.group import ShmGroup, alive
from onecard.comm.shm.other_devices import unrecorded
from onecard.comm.shm.two_levels import HostsGroup, fits, grid_of

NAME = "shm"
_warned = False


def available() -> bool:
    """Whether this system has what the backend needs: Linux, and torch.distributed."""
    return futex.available() and hasattr(os, "memfd_create")


def register() -> None:
    """Makes torch.distributed know the backend. Once is enough; later calls do nothing."""
    if not dist.is_available() or NAME.upper() in _torch.backend_makers:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    functional.ours += [ShmGroup, HostsGroup]
    functional.serve()
    atexit.register(_leave_all)


def _install() -> None:
    """What torch asks of Gloo's groups by name is asked of ours, too."""
    for name, replacement in (("monitored_barrier", _monitored_barrier), ("split_group", _split_group)):
        make = functools.partial(functools.partial, replacement)
        patches.replace(f"torch.distributed.{name}", c10d, name, make, beside=[dist])
    unrecorded()


def _create(options: Any, _: Any = None) -> Any:
    """A group, or Gloo's if these ranks cannot share memory. Called by torch on every member."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    store = dist.PrefixStore("shm/", attempt.part_of(store))
    if (grid := _grid(store, rank, size)) and len(grid) > 1:
        return _over_hosts(store, rank, ranks, grid, timeout)
    try:
        channel = rendezvous.connect(store, rank, ranks, timeout.total_seconds())
    except rendezvous.Refused as reason:
        _warn(rank, ranks, str(reason))
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    _install()
    return ShmGroup(store, channel, timeout)


def _grid(store: Any, rank: int, size: int) -> list[list[int]]:
    """The ranks of a group by host; [] where the launcher says that there is one host, or that of each rank is not asked for."""
    if size == 1 or os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-"):
        return []
    store.set(f"kernel/{rank}", peers.kernel())
    return grid_of([store.get(f"kernel/{other}").decode() for other in range(size)])


def _over_hosts(store: Any, rank: int, ranks: list[int], grid: list[list[int]], timeout: timedelta) -> Any:
    """Two levels where each host has as many ranks and these share memory; else Gloo, on all of them alike."""
    flat = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, len(ranks), timeout=timeout)
    if not fits(grid):
        return flat
    host = next(n for n, members in enumerate(grid) if rank in members)
    place, inside, refused = grid[host].index(rank), dist.PrefixStore(f"host{host}/", store), ""
    try:
        mine = [ranks[member] for member in grid[host]]
        channel = rendezvous.connect(inside, place, mine, timeout.total_seconds())
    except rendezvous.Refused as reason:
        refused = str(reason)
    store.set(f"refused/{rank}", refused)
    reasons = [text for other in range(len(ranks)) if (text := store.get(f"refused/{other}").decode())]
    if reasons:
        _warn(rank, ranks, reasons[0])
        return flat
    line = dist.ProcessGroupGloo(dist.PrefixStore(f"line{place}/", store), host, len(grid), timeout=timeout)
    _install()
    return HostsGroup(store, rank, ShmGroup(inside, channel, timeout), line, flat, grid, timeout)


def _warn(rank: int, ranks: list[int], reason: str) -> None:
    global _warned
    if rank == 0 and not _warned:
        _warned = True
        warn(
            f"the ranks {ranks} cannot share memory, so they use Gloo instead of shm, which is slower: {reason}. "
            'ONECARD_BACKEND=gloo (or init_process_group("gloo")) chooses it without this warning.',
        )


def _leave_all() -> None:
    for group in list(alive):
        group._channel.leave()


def _of(group: Any) -> ShmGroup | HostsGroup | None:
    found = group if group is not None else (dist.group.WORLD if dist.is_initialized() else None)
    return found if isinstance(found, ShmGroup | HostsGroup) else None


def _monitored_barrier(original: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    # torch compares the backend's name with Gloo's before it calls the group's own.
    ours = _of(group)
    if ours is None:
        return original(group, timeout, wait_all_ranks)
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    ours.monitored_barrier(limit, wait_all_ranks)
    return None


def _split_group(
    original: Any,
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
    **others: Any,
) -> Any:
    # torch splits only groups of an accelerator. On the CPU every part is made anew, by its own members.
    ours = _of(parent_pg)
    if ours is None or torch.accelerator.is_available():
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    names, backend, mine = dist.get_process_group_ranks(ours), dist.get_backend(ours), None
    whole = len(names) == dist.get_world_size()
    for part in split_ranks:
        member = ours.rank() in part
        # torch names a group made by its members alone after how many groups each has, which must then be equal.
        if member or whole:
            ranks = [names[rank] for rank in sorted(part)]
            made = dist.new_group(ranks, timeout, backend, use_local_synchronization=not whole, group_desc=group_desc)
            mine = made if member else mine
    return mine
