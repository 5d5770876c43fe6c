"""Process groups of mesh axes: made at first use, cached, one for each line of ranks."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onecard._torch import names as _torch
from onecard.comm.agree import check, ended, sparse_check
from onecard.comm.agree.clock import Clock
from onecard.comm.base import attempt
from onecard.comm.base.state import REAL, Kept, home
from onecard.comm.world import hosts, world
from onecard.errors import CommunicationError
from onecard.place.mesh import ProcessMesh


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ranks along one mesh axis through this process; ``index`` is this process's place among them.

    ``process_group`` is None in a group of one, which never sends anything. It counts its ranks in ascending order,
    whatever the mesh says: ``order`` has, for each of its ranks, the place in ``ranks``; None if they agree. ``clock`` counts
    its messages, for the sparse check; None where that is off. ``name`` is what ``explain`` calls the axis of a group of any
    ranks.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: Any
    order: tuple[int, ...] | None = None
    clock: Clock | None = None
    name: str = "group"
    messages: dict[Any, Any] = field(default_factory=dict)  # of ``message.py``

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)


def _process_group(ranks: tuple[int, ...]) -> Any:
    if ranks not in _process_groups.here:
        _process_groups.here[ranks] = _made(ranks)
    return _process_groups.here[ranks]


def _made(ranks: tuple[int, ...]) -> Any:
    if len(ranks) == 1:
        return None
    if ranks == tuple(range(world.get_world_size())):
        return dist.group.WORLD
    if check.on:  # making a group waits for its members as well
        check.agreed(f"the first message among ranks {list(ranks)}", ranks, check.ADVICE)
    # Only the members make it, so that ranks outside a mesh need not know of it. torch would name it by its ranks and by
    # how many groups this process has made before, which the members need not have in common: then they wait for ever.
    name = f"onecard{attempt.number()}_" + "_".join(map(str, ranks))
    with _torch.group_named(name):
        return dist.new_group(list(ranks), use_local_synchronization=True, timeout=world.TIMEOUT)


def back_of(group: Group) -> Any:
    """A second process group of the same ranks, for what goes from a later place to an earlier one; made at first use, by all.

    NCCL sends what two ranks of a process group tell each other one after the other, in both directions: in one order each way
    is not enough where each waits for the other.
    """
    key = tuple(sorted(group.ranks))
    if key not in _ways_back.here:
        with _torch.group_named(f"onecard{attempt.number()}_back_" + "_".join(map(str, key))):
            _ways_back.here[key] = dist.new_group(list(key), use_local_synchronization=True, timeout=world.TIMEOUT)
    return _ways_back.here[key]


_ways_back: Kept[dict[tuple[int, ...], Any]] = Kept(dict)
_groups: Kept[dict[tuple[ProcessMesh, int], Group]] = Kept(dict)
_process_groups: Kept[dict[tuple[int, ...], Any]] = Kept(dict)
_device_meshes: Kept[dict[ProcessMesh, DeviceMesh]] = Kept(dict)
_clocks: Kept[dict[tuple[int, ...], Clock | None]] = Kept(dict)


def _clock(ranks: tuple[int, ...]) -> Clock | None:
    if ranks not in _clocks.here:
        made = _process_group(ranks)
        _clocks.here[ranks] = found = Clock(ranks, made) if sparse_check.on.here and made is not None else None
        if found is not None and not found.carried:
            ended.watch()
    return _clocks.here[ranks]


def group(mesh: ProcessMesh, axis: int) -> Group:
    """This process's group along one axis of a mesh.

    Raises:
        CommunicationError: the mesh names ranks that the world does not have.
    """
    found = _groups.here.get((mesh, axis))
    if found is None:
        check_world(mesh)
        world.init()
        ranks = tuple(mesh.neighbours(axis))
        ascending = tuple(sorted(ranks))
        order = None if ascending == ranks else tuple(ranks.index(rank) for rank in ascending)
        found = Group(ranks, ranks.index(world.get_rank()), _process_group(ascending), order, _clock(ascending))
        forget_at_exit()
        _groups.here[mesh, axis] = found
    return found


def history(mesh: ProcessMesh) -> tuple[int, int]:
    """How many messages went along the axes of a mesh so far, and a hash of them: the same on ranks that do the same."""
    known = (_groups.here.get((mesh, axis)) for axis in range(mesh.ndim))
    clocks = [found.clock for found in known if found is not None and found.clock is not None]
    return sum(clock.site.count for clock in clocks), hash(tuple(clock.chain for clock in clocks))


def forget_at_exit() -> None:
    """A group that outlives the interpreter's shutdown may drop a tensor in its own thread, which aborts."""
    if home.here is REAL:
        atexit.unregister(forget)
        atexit.register(forget)


def line_of(found: Group) -> tuple[ProcessMesh, int]:
    """A mesh and an axis of it along which the ranks of a group are, for who has to name it."""
    known = next((line for line, known in _groups.here.items() if known is found), None)
    return known or (ProcessMesh(found.ranks, [found.name]), 0)


def check_world(mesh: ProcessMesh) -> None:
    """Raise a CommunicationError if the mesh names ranks that this world does not have."""
    size = world.get_world_size()
    if mesh.highest >= size:
        missing = [rank for rank in mesh.process_ids if rank >= size]
        need = mesh.highest + 1
        raise CommunicationError(
            f"{mesh!r} names rank(s) {missing}, but this world has {size} process(es) (ranks 0 to {size - 1}). "
            f"Run the program as: onecard run --nproc_per_node {need} script.py; or let the mesh be as large as the world, also "
            "without a launcher: onecard.ProcessMesh(range(onecard.get_world_size()), ...)"
        )


def forget() -> None:
    """Forget every cached group (after the process group is destroyed, as tests do)."""
    hosts.forget()
    for table in (_groups, _clocks, _process_groups, _device_meshes, _ways_back):
        table.here.clear()
    for drop in also_forget:
        drop()


apart: Kept[set[ProcessMesh]] = Kept(set)
"""Meshes whose ranks run on by themselves, beside those of other meshes (``fleet.group_sharded_parallel``): they compute
losses of their own samples, and what they ask of a tensor is asked of them alone."""

stages: Kept[set[ProcessMesh]] = Kept(set)
"""Meshes of stages of a program that every rank runs as it is: what Python asks of a tensor there, every rank asks."""

also_forget: list[Callable[[], None]] = []
"""What other modules keep of groups."""


def to_device_mesh(mesh: ProcessMesh) -> DeviceMesh:
    """The torch ``DeviceMesh`` with the same ranks and axis names. Every rank of the world must call it.

    Returns:
        A DeviceMesh on the device of this process, one and the same for equal meshes. Its groups are torch's:
        ``to_device_mesh(mesh).get_group("tp")``.

    Raises:
        CommunicationError: the mesh names ranks that the world does not have, or the other processes cannot be reached.

    Example:
        >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        >>> to_device_mesh(mesh)  # doctest: +SKIP
        DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))
    """
    check_world(mesh)
    world.init()
    if mesh not in _device_meshes.here:
        grid = torch.tensor(mesh.mesh, device="cpu")
        _device_meshes.here[mesh] = DeviceMesh(world.device().type, grid, mesh_dim_names=tuple(mesh.dim_names))
    return _device_meshes.here[mesh]


def from_device_mesh(device_mesh: DeviceMesh) -> ProcessMesh:
    """The ProcessMesh with the ranks and axis names of a torch ``DeviceMesh``. Nothing is sent.

    Raises:
        MeshError: axis names that do not fit.

    Example:
        >>> from types import SimpleNamespace
        >>> like = SimpleNamespace(mesh=torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"))
        >>> from_device_mesh(like)  # any DeviceMesh; making a real one starts a process group
        ProcessMesh([[0, 1], [2, 3]], dim_names=['dp', 'tp'])
    """
    return ProcessMesh.from_device_mesh(device_mesh)
