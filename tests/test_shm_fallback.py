"""When the ranks of a group cannot share memory, and how that is found out: all of them take Gloo, and one says why."""

import os
import platform
import re
import resource
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onecard.comm import shm
from onecard.comm.shm import futex, peers, rendezvous, segment
from onecard.comm.world import world
from onecard.errors import CommunicationError
from onecard.testing import run_ranks

pytestmark = pytest.mark.skipif(not shm.available(), reason="needs Linux")


def without_memory():
    before = peers.kernel
    if dist.get_rank() == 1:
        peers.kernel = lambda: "another host"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair, _ = (dist.new_group([0, 1], backend="shm") for _ in range(2))
    peers.kernel = before
    x = torch.ones(3)
    dist.all_reduce(x, group=pair)
    return x.tolist(), type(pair).__name__, [str(w.message) for w in caught if "Gloo" in str(w.message)]


def test_ranks_of_different_hosts_use_gloo_with_one_warning():
    (x, kind, said), (y, other, silent) = run_ranks(without_memory, 2, backend="gloo")
    assert x == y == [2.0] * 3 and kind == other == "ProcessGroup" and silent == []
    (warning,) = said
    assert "rank 1 cannot share memory with rank 0: they run on different hosts, or in containers" in warning
    assert "ONECARD_BACKEND=gloo" in warning


def no_room():
    """The system's own limit on the size of files, which memory without a name is too."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))


def no_memory():
    segment.os.memfd_create = refuse


def no_descriptors():
    """As with another user, or where /proc hides other processes."""
    segment.os.open = refuse


def no_futexes():
    futex._NUMBER, futex._call = None, None


def somebody_elses_memory():
    """A pid that means another process here than there, with a descriptor of the same number."""
    rendezvous.secrets.token_hex = lambda n: "0" * 2 * n
    segment.Segment.open = classmethod(lambda cls, path, plan: cls.private(plan))


def refuse(*_):
    raise PermissionError(1, "Operation not permitted")


def fallen_back(fault, where):
    if dist.get_rank() == where:
        fault()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = dist.new_group([0, 1], backend="shm")
    x = torch.ones(3)
    dist.all_reduce(x, group=pair)
    return x.tolist(), type(pair).__name__, [str(w.message) for w in caught if "Gloo" in str(w.message)]


@pytest.mark.parametrize(
    ("fault", "where", "reason"),
    [
        (no_room, 0, "rank 0 cannot make shared memory: .*File too large"),
        (no_memory, 0, "rank 0 cannot make shared memory: .*not permitted"),
        (no_futexes, 0, "rank 0 cannot make shared memory: no futexes on this system"),
        (no_descriptors, 1, "rank 1 cannot share memory with rank 0: .*not permitted"),
        (no_futexes, 1, "rank 1 cannot share memory with rank 0: no futexes on this system"),
        (somebody_elses_memory, 1, "the memory that was found is not the one that was offered"),
    ],
)
def test_whatever_a_rank_lacks_all_use_gloo_and_one_warns(fault, where, reason):
    (x, kind, said), (y, other, silent) = run_ranks(fallen_back, 2, fault, where, backend="gloo")
    assert x == y == [2.0] * 3 and kind == other == "ProcessGroup" and silent == []
    (warning,) = said
    assert re.search(reason, warning), warning


def named(name):
    socket.gethostname = platform.node = lambda: f"{name}-{dist.get_rank()}"
    return type(dist.new_group([0, 1], backend="shm")).__name__


def test_host_names_do_not_count():
    """Containers share them, and one host may have several."""
    assert run_ranks(named, 2, "host", backend="gloo") == ["ShmGroup"] * 2


def test_what_tells_hosts_apart_is_the_kernels_own():
    text = peers.kernel()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in text
    assert os.readlink("/proc/self/ns/pid") in text and os.readlink("/proc/self/ns/user") in text


def mapped():
    group = dist.new_group([0, 1], backend="shm")
    dist.all_reduce(torch.ones(1000), group=group)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if "onecard-shm" in line or "/dev/shm" in line}


def test_the_memory_is_no_file_so_that_the_size_of_dev_shm_does_not_matter():
    assert run_ranks(mapped, 2, backend="gloo") == [{"/memfd:onecard-shm (deleted)"}] * 2


def test_a_gpu_for_each_rank_or_a_word(monkeypatch):
    for name in ("ONECARD_BACKEND", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert world.device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world.gpu_for_each()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(CommunicationError, match=r"4 ranks on this host, and 2 GPUs.*--nproc_per_node 2.*BACKEND=shm"):
        world.gpu_for_each()
    for backend, kind in {"cpu:gloo,cuda:nccl": "cuda", "shm": "cpu", "gloo": "cpu"}.items():
        monkeypatch.setenv("ONECARD_BACKEND", backend)
        assert world.device().type == kind
    monkeypatch.delenv("ONECARD_BACKEND")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for backend, kind in {"nccl": "cuda", "gloo": "cpu", "fake": "cpu"}.items():  # the program's own group
        monkeypatch.setattr("torch.distributed.get_backend", lambda backend=backend: backend)
        assert world.device().type == kind


def test_the_default_follows_the_hosts_and_the_environment(monkeypatch):
    for name in ("ONECARD_BACKEND", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert world.default_backend() == "shm" and world.default_backend("cuda") == "nccl"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # several hosts: shared memory is one of two levels
    assert world.default_backend() == "shm"
    monkeypatch.setenv("ONECARD_BACKEND", "gloo")
    assert world.default_backend() == "gloo"
