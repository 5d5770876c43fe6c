"""What is so on this machine: versions, devices, memory, cores, limits. Looked up, not judged."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from onecard._version import __version__
from onecard.comm import shm
from onecard.doctor.network import Network
from onecard.doctor.network import look as look_at_network
from onecard.launch._allocator import CHOSEN, allocator

EXTRAS = {
    "matplotlib": "schedules and timelines as pictures",
    "transformers": "Hugging Face's models",
    "tensorboard": "curves",
    "wandb": "curves",
    "torchmetrics": "metrics of Engine",
}
"""What is used where it is installed, and what for."""
_ASKED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ONECARD_BACKEND", *CHOSEN,
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What is so.

    Attributes:
        onecard, python, torch: versions; built: for what torch is built: "CPU", "CUDA 12.8", "ROCm 6.4".
        gpus: names of the GPUs that torch sees; devices: how many the driver has; nccl: its version, "" if torch has none.
        shared: whether ranks of this host can share memory (futexes and memfd); dev_shm: bytes of /dev/shm and free ones of
            them, None if there is none that can be written to.
        cores: that this process may use, of ``machine_cores``; quota: how many of them at a time, 0 if all.
        memory: bytes of this machine; memory_limit: of this control group, 0 if none.
        files: how many one process may have open, and how many it may ask for.
        allocator: what ``onecard run`` sets for the ranks' allocator on the CPU.
        environment: the variables of launchers and libraries that are set; extras: versions, "" of what is not installed.
    """

    onecard: str
    python: str
    torch: str
    built: str
    gpus: tuple[str, ...]
    devices: int
    nccl: str
    shared: bool
    dev_shm: tuple[int, int] | None
    cores: int
    machine_cores: int
    quota: float
    memory: int
    memory_limit: int
    files: tuple[int, int]
    allocator: Mapping[str, str]
    environment: Mapping[str, str]
    extras: Mapping[str, str]
    network: Network


def look(environment: Mapping[str, str] = os.environ) -> Facts:
    """Looks at this machine. Nothing is measured or changed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Facts(
        __version__,
        platform.python_version(),
        torch.__version__,
        _built(),
        tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        len([*Path("/dev").glob("nvidia[0-9]*")]),
        _nccl(),
        shm.available(),
        dev_shm(),
        cores,
        os.cpu_count() or cores,
        _quota(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        _limit("memory.max", "memory/memory.limit_in_bytes"),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        allocator(environment),
        {name: environment[name] for name in _ASKED if name in environment},
        {name: _version(name) for name in EXTRAS},
        look_at_network(environment),
    )


def dev_shm(path: str = "/dev/shm") -> tuple[int, int] | None:
    """Bytes of the file system there, and the free ones; None if there is no folder, or none that can be written to."""
    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        return None
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _built() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else "CPU"


def _nccl() -> str:
    with suppress(RuntimeError, AttributeError, ImportError):
        if torch.distributed.is_nccl_available():
            return ".".join(map(str, torch.cuda.nccl.version()))
    return ""


def _quota() -> float:
    """How many cores the control group gives at a time; 0 if it does not say."""
    with suppress(OSError, ValueError):
        given, each = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return 0.0 if given == "max" else int(given) / int(each)
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        given, each = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
        return max(0.0, int(given) / int(each))
    return 0.0


def _limit(*names: str) -> int:
    """A number of this control group; 0 where it is none or no limit."""
    for name in names:
        with suppress(OSError, ValueError):
            found = int((Path("/sys/fs/cgroup") / name).read_text())
            return found if found < 2**60 else 0
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
