"""Any rank of any world in one process, in which nothing is sent: to see what a program would do, without devices."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist

from onecard.comm.base.state import Kept, World
from onecard.machine.cost import Machine

# Meta tensors stand for values that nobody needs, also those of which is known how they are made (``deferred_init``).
rehearsing: Kept[bool] = Kept(bool)


def pretend(world_size: int, rank: int = 0, machine: Machine | None = None, fake: bool = False) -> World:
    """Be one rank of a world of any size inside the block, without processes, before or beside a real process group.

    The program runs as that rank would run it: ``get_rank()``, ``ProcessMesh.coordinate()``, ``to_local()`` and the messages
    that ``explain()`` lists are its own. Nothing is sent, so values mean nothing; shapes and layouts do. Tensors on the meta
    device stay there, so that a model of any size takes no memory. What is decided, counted and drawn inside is dropped
    with the world: a real run before and after it is untouched. ``onecard``'s observers (``explain``) are a world's
    own: begin them inside.

    Args:
        world_size: how many ranks there are.
        rank: which of them this process is.
        machine: what messages and computations are priced with (``onecard.Machine``); it bears on every choice.
        fake: all tensors that are made inside are without data (torch's FakeTensorMode): a model of any size takes no memory,
            and its operators are those that a run on their device takes, also where torch chooses by the device. What is
            not known without data (``.item()``) is an error. The way to record a step for a machine that is not there.

    Returns:
        The World, for ``with``; entered again it goes on with what it has decided.

    Raises:
        CommunicationError: no such rank.

    Example:
        >>> import torch, onecard as oc
        >>> with oc.pretend(world_size=1024, rank=17):
        ...     mesh = oc.ProcessMesh(torch.arange(1024).view(128, 8), ["dp", "tp"])
        ...     x = oc.shard_tensor(torch.empty(4096, 1024, device="meta"), mesh, [oc.Shard(0), oc.Shard(1)])
        ...     mesh.coordinate(), x.to_local().shape
        ((2, 1), torch.Size([32, 128]))
    """
    return World(world_size, rank, machine, fake)


def rehearse() -> AbstractContextManager[None]:
    """Inside, meta tensors are laid out as they are: only shapes are computed."""
    return rehearsing.during(True)


def pretending() -> bool:
    """Whether messages have no effect here, so that values mean nothing."""
    return dist.is_initialized() and dist.get_backend() == "fake"
