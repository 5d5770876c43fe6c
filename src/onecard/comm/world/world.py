"""The world: this process's rank, the default process group and the device. Made at first use, from the environment.

With no launcher a process is a world of one and never opens a socket.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from onecard.comm import shm
from onecard.comm.base import attempt, flight
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.comm.world import each_host, interface, schedulers
from onecard.errors import CommunicationError
from onecard.place import mesh as _mesh

TIMEOUT = timedelta(seconds=float(os.environ.get("ONECARD_TIMEOUT", "600")))


_told = schedulers.Scheduled({})


def ask_scheduler() -> None:
    """Take what Slurm or mpirun tells this process into its environment, under the names that torch and programs read."""
    global _told
    _told = schedulers.told(os.environ)
    os.environ.update(_told.variables)


ask_scheduler()


def get_rank() -> int:
    """This process's rank in the world: 0 without a launcher.

    Source: ``paddle.distributed.get_rank``; the variable RANK that torchrun sets.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """How many processes the program runs on: 1 without a launcher.

    Source: ``paddle.distributed.get_world_size``; the variable WORLD_SIZE that torchrun sets.

    Example:
        >>> get_world_size()
        1
    """
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_job() -> bool:
    """Whether a launcher started this process or it is in a process group, so that it is not a notebook or a tool."""
    return dist.is_initialized() or "RANK" in os.environ


def device() -> torch.device:
    """Where this process's local tensors live: its GPU under NCCL, else the CPU."""
    if torch.cuda.is_available() and _over_gpus():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _over_gpus() -> bool:
    """Whether messages go over NCCL, as "nccl" or in "cpu:gloo,cuda:nccl", or will."""
    if "nccl" not in os.environ.get("ONECARD_BACKEND", "nccl"):
        return False
    return not dist.is_initialized() or dist.get_backend() not in _OF_CPUS


_OF_CPUS = ("gloo", "shm", "mpi", "fake")
"""Groups whose maker meant the CPU, and pretended ones: what lies on it stays."""


def default_backend(device_type: str = "cpu") -> str:
    """ONECARD_BACKEND if set; else NCCL on GPUs, shared memory on the CPU, and Gloo where there is none.

    Of a group that spans hosts shared memory is one level, and Gloo between the hosts the other; the ranks find out themselves.
    """
    if named := os.environ.get("ONECARD_BACKEND"):
        return named
    if device_type == "cuda":
        return "nccl"
    return "shm" if shm.available() else "gloo"


def init() -> None:
    """Join the process group that the launcher's environment describes; nothing to do in a world of one.

    Called by itself at the first collective. A group that the program has made already is used as it is.

    Raises:
        CommunicationError: WORLD_SIZE says more than one, but the rendezvous cannot be reached.
    """
    if not dist.is_initialized() and get_world_size() > 1:
        _join()
    elif _told.doubt and not _doubted.here:
        _doubted.here = True
        warn(_told.doubt)
    while waiting.here and dist.is_initialized():
        waiting.here.pop(0)()


_doubted: Kept[bool] = Kept(bool)

# What the ranks said before they met, to be compared as soon as they have (see ``agree``).
waiting: Kept[list[Callable[[], None]]] = Kept(list)


def has_met() -> bool:
    """Whether the ranks have met."""
    return dist.is_available() and dist.is_initialized()


def _join() -> None:
    place = device()
    if place.type == "cuda":
        if not own_gpu.here:
            gpu_for_each()
        torch.cuda.set_device(place)
    backend = default_backend(place.type)
    if _told.lacks and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise CommunicationError(_told.lacks)
    interface.choose()
    try:
        # Not by init_process_group alone: under torchrun it would meet the addresses of ranks that died before a restart.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        part = attempt.part_of(store)
        dist.init_process_group(backend, store=part, rank=rank, world_size=size, timeout=TIMEOUT)
        each_host.learn(part, rank, size)
    except (RuntimeError, ValueError) as fault:
        raise CommunicationError(_cannot_join(backend, fault)) from fault
    atexit.register(_leave)
    launcher = sys.modules.get("_onecard_launcher")  # under ``onecard run``: it watches what the ranks wait for
    if launcher is not None and flight.board.here is None:
        with suppress(OSError):
            flight.board.here = flight.Board.create(launcher.board)


own_gpu: Kept[bool] = Kept(bool)
"""Whether this rank sees one GPU, its own, whatever the host has."""


def gpu_for_each() -> None:
    """Two ranks on one GPU would meet, and fail in their first message: NCCL takes one of each.

    Raises:
        CommunicationError: this host has GPUs, and fewer than ranks.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus > 0 and "NCCL_HOSTID" not in os.environ:  # by which NCCL takes ranks for those of several hosts
        raise CommunicationError(
            f"{ranks} ranks on this host, and {gpus} GPU{'s' * (gpus > 1)}: NCCL needs one for each. Start as many ranks: "
            f"onecard run --nproc_per_node {gpus}; or take the CPU: ONECARD_BACKEND=shm"
        )


def _cannot_join(backend: str, fault: Exception) -> str:
    said = os.environ.get
    where = f"{said('MASTER_ADDR')}:{said('MASTER_PORT')}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not said(name)]
    if missing:
        cure = (
            f"{' and '.join(missing)} not set. Start the program with 'onecard run --nproc_per_node N script.py' (or "
            "torchrun), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank"
        )
    else:
        cure = (
            f"The ranks meet at {where} (MASTER_ADDR, MASTER_PORT), where rank 0 listens: is it there, is its address reached "
            f"from here, are all {get_world_size()} ranks started? {interface.words()}. Gloo's interface is "
            f"{said('GLOO_SOCKET_IFNAME') or 'not set'}; GLOO_SOCKET_IFNAME names another one"
        )
    me = f"rank {get_rank()} of {get_world_size()} on {socket.gethostname()}"
    return f"{me} cannot join its process group ({backend}): {fault}. {cure}."


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


alone: Kept[bool] = Kept(bool)
"""Whether the present world reads a program of many ranks as one card's: its meshes are of one rank, whatever they name."""

_mesh.rank_source = get_rank
_mesh.alone_source = lambda: alone.here
