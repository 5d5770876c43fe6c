"""Ranks that are started again: nothing that a dead attempt left behind is taken for a living rank's word."""

import os
from pathlib import Path

import pytest
import torch
from launching import launch_forked, write
from torch.distributed.run import main as torchrun
from torch.utils.data import DataLoader

import onecard as oc
from onecard.testing import run_ranks

# Each attempt is a resumed job: other seed, other order, one batch more; rank 0 comes last. The last rank dies, until `LAST`.
RESUMED = """
    import os, time
    attempt, rank, size = (int(os.environ[n]) for n in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    import torch
    import onecard as oc
    from torch.utils.data import DataLoader

    {first}
    if attempt and rank == 0:
        time.sleep(0.5)
    mesh = oc.ProcessMesh(list(range(size)), ["dp"])
    oc.manual_seed(attempt)
    loader = DataLoader(torch.arange(24.0), 6, shuffle=True, generator=torch.Generator().manual_seed(attempt))
    drawn = oc.rand([8], mesh=mesh, placements=[oc.Shard(0)]).full_tensor()
    read = [x.full_tensor().tolist() for x, _ in zip(oc.shard_dataloader(loader, mesh), range(attempt + 2))]
    half = oc.ProcessMesh([size - 2, size - 1], ["tp"])  # a group of its own, and a word about its hosts
    moved = oc.reshard(oc.shard_tensor(torch.arange(4.0), mesh, [oc.Shard(0)]), half, [oc.Shard(0)])
    moved = oc.reshard(moved, mesh, [oc.Replicate()])
    if rank == size - 1 and attempt < {last}:
        os._exit(3)
    print("attempt", attempt, [round(v, 6) for v in drawn.tolist()], read, moved.full_tensor().tolist(), flush=True)
    print("over", torch.distributed.get_backend(), type(torch.distributed.group.WORLD).__name__)
"""


def one_card(attempt: int) -> str:
    """What rank 0 prints in the last attempt."""
    alone = oc.ProcessMesh([0], ["dp"])
    oc.manual_seed(attempt)
    drawn = [round(v, 6) for v in oc.rand([8], mesh=alone, placements=[oc.Replicate()]).tolist()]
    loader = DataLoader(torch.arange(24.0), 6, shuffle=True, generator=torch.Generator().manual_seed(attempt))
    read = [x.tolist() for x, _ in zip(loader, range(attempt + 2), strict=False)]
    return f"attempt {attempt} {drawn} {read} {torch.arange(4.0).tolist()}"


def restart(folder: Path, backend: str, launcher: str, argv: list[str]) -> tuple[int, str]:
    """Runs a launcher in this process; returns its status and what rank 0 wrote."""
    environment = {"ONECARD_BACKEND": backend, "ONECARD_TIMEOUT": "30", "ONECARD_CHECK": "1"}
    if launcher == "onecard":
        return launch_forked(folder, argv, environment)
    os.environ |= environment
    os.chdir(folder)
    status = 0
    try:
        torchrun(["--redirects", "3", "--log-dir", "logs", "--local-addr", "127.0.0.1", *argv])
    except BaseException as error:
        status = 1
        print(error)
    return status, "\n".join(path.read_text() for path in sorted(folder.glob("logs/**/0/std*.log")))


def check(found: tuple[int, str], attempt: int, backend: str) -> None:
    status, output = found
    assert status == 0, output
    lines = output.splitlines()
    assert one_card(attempt) in lines
    assert f"over {backend} {'ShmGroup' if backend == 'shm' else 'ProcessGroup'}" in lines
    assert "instead of shm" not in output


# Every start costs seconds: each backend with each launcher, size and kind of group once.
@pytest.mark.proof
@pytest.mark.parametrize(("backend", "size", "last"), [("shm", 3, 1), ("gloo", 2, 2)])
def test_a_resumed_job_ends_well(tmp_path, backend, size, last):
    program = write(tmp_path, RESUMED.format(first="", last=last))
    options = ["--nproc_per_node", str(size), "--max_restarts", "2", program]
    [found] = run_ranks(restart, 1, tmp_path, backend, "onecard", options)
    check(found, last, backend)


@pytest.mark.proof  # six interpreters
@pytest.mark.parametrize("backend", ["shm"])
def test_under_torchrun(tmp_path, backend):
    program = write(tmp_path, RESUMED.format(first="", last=1))
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", program]
    [found] = run_ranks(restart, 1, tmp_path, backend, "torchrun", options)
    check(found, 1, backend)


@pytest.mark.parametrize("backend", ["gloo"])
def test_with_a_group_that_the_program_makes(tmp_path, backend):
    made = f'torch.distributed.init_process_group("{backend}")'
    program = write(tmp_path, RESUMED.format(first=made, last=1))
    options = ["--nproc_per_node", "2", "--max_restarts", "1", program]
    [found] = run_ranks(restart, 1, tmp_path, backend, "onecard", options)
    check(found, 1, backend)
