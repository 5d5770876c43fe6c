"""Who this rank is, and the mesh that a program sets once."""

from __future__ import annotations

import os

import torch

from onecard.comm.world import world
from onecard.errors import MeshError
from onecard.place.mesh import ProcessMesh


class ParallelEnv:
    """What the launcher's environment says of this rank.

    Source: ``paddle.distributed.ParallelEnv``.

    Example:
        >>> env = ParallelEnv()
        >>> env.rank, env.world_size, env.local_rank, env.nranks
        (0, 1, 0, 1)
    """

    @property
    def rank(self) -> int:
        """This process' rank in the world."""
        return world.get_rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return world.get_world_size()

    @property
    def local_rank(self) -> int:
        """This process' number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    nranks = world_size
    device_id = dev_id = local_rank


def init_parallel_env() -> ParallelEnv:
    """Have the ranks meet now. Without it the first message does.

    Raises:
        CommunicationError: a rank did not come in time.

    Source: ``paddle.distributed.init_parallel_env``.

    Example:
        >>> init_parallel_env().rank
        0
    """
    if world.get_world_size() > 1:
        world.init()
    return ParallelEnv()


def destroy_process_group(group: object = None) -> None:
    """Nothing: groups end with the process. Source: ``paddle.distributed.destroy_process_group``."""


def is_available() -> bool:
    """Whether torch was built with its distributed package. Source: ``paddle.distributed.is_available``."""
    return torch.distributed.is_available()


class _Set:
    mesh: ProcessMesh | None = None


def set_mesh(mesh: ProcessMesh) -> None:
    """The mesh that ``get_mesh`` answers and ``parallelize`` takes if it is given none. No other call reads it.

    Raises:
        MeshError: something else than a mesh.

    Source: ``paddle.distributed.set_mesh``.

    Example:
        >>> set_mesh(ProcessMesh([0], ["dp"]))
        >>> get_mesh()
        ProcessMesh([0], dim_names=['dp'])
    """
    if not isinstance(mesh, ProcessMesh):
        raise MeshError(f"set_mesh: want an oc.ProcessMesh, not {type(mesh).__name__}; oc.from_device_mesh converts")
    _Set.mesh = mesh


def get_mesh() -> ProcessMesh | None:
    """What ``set_mesh`` was given last; None before. Source: ``paddle.distributed.get_mesh``."""
    return _Set.mesh
