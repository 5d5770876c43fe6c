"""Slurm, MPI's launchers, Kubernetes, Ray: what they tell a process is understood, or the line to write is said.

The environments are those that the launchers are documented to set; the launchers themselves are not here.
"""

import os
import subprocess
from pathlib import Path

import pytest
from launching import started_by_hand, write

from onecard.comm.world import schedulers
from onecard.launch._options import LaunchError, Options, parse, read
from onecard.launch._torchrun import translated

PROGRAM = """
import torch, onecard as oc
mesh = oc.ProcessMesh(range(oc.get_world_size()), ["x"])
x = oc.shard_tensor(torch.arange(8.0), mesh, [oc.Shard(0)])
print(oc.get_rank(), oc.get_world_size(), x.sum().item())
"""


def slurm(rank: int, size: int = 2, **more: str) -> dict[str, str]:
    number = str(os.getpid())
    return {
        "SLURM_JOB_ID": number, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NODELIST": "here1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
    } | more  # fmt: skip


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size), "PMIX_NAMESPACE": f"prterun-here-{os.getpid()}@1",
    }  # fmt: skip


def mpich(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(size),
        "PMI_PORT": f"here:{os.getpid()}",
    }  # fmt: skip


def mvapich(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "MV2_COMM_WORLD_RANK": str(rank), "MV2_COMM_WORLD_SIZE": str(size), "MV2_COMM_WORLD_LOCAL_RANK": str(rank),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(size), "PMI_JOBID": f"kvs_{os.getpid()}",
    }  # fmt: skip


def pmix(rank: int, size: int = 2) -> dict[str, str]:
    """PRRTE's prun, and Slurm's --mpi=pmix without Slurm's own names: no word of the host, so that the address is the user's."""
    return {
        "PMIX_RANK": str(rank), "PMIX_SIZE": str(size), "PMIX_NAMESPACE": f"here.{os.getpid()}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9000),
    }  # fmt: skip


def pytorch_job(rank: int, size: int = 2) -> dict[str, str]:
    """A pod of Kubeflow's PyTorchJob: one process in each; MASTER_ADDR is a service's name, which here is loopback's."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": str(20000 + (os.getpid() + 1) % 9000), "PET_NPROC_PER_NODE": "auto", "PET_NNODES": str(size),
        "PET_NODE_RANK": str(rank), "PET_RDZV_BACKEND": "c10d",
    }  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("of", [slurm, open_mpi, mpich, mvapich, pmix, pytorch_job])
def test_ranks_of_a_launcher_on_one_host_are_one_world(tmp_path, of):
    ends = started_by_hand(tmp_path, PROGRAM, [of(0), of(1)])
    assert ends == [(0, "0 2 28.0\n"), (0, "1 2 28.0\n")]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_cannot_meet_are_no_worlds_of_one(tmp_path, rank):
    cases = {
        "srun python train.py": {"SLURM_PROCID": rank, "SLURM_NTASKS": "2"},
        "mpirun -x MASTER_ADDR=": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2"},
        "mpiexec -genv MASTER_ADDR": {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"},
        "MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 mpiexec": {"PMIX_RANK": rank, "PMIX_SIZE": "2"},
    }
    ends = started_by_hand(tmp_path, PROGRAM, list(cases.values()))
    for line, (status, output) in zip(cases, ends, strict=True):
        assert status == 1 and "28.0" not in output
        assert "CommunicationError: " in output and f"this is rank {rank} of 2" in output and line in output


def test_the_script_of_sbatch_is_one_process_and_is_told_of_srun(tmp_path):
    batch = slurm(0)
    del batch["SLURM_STEP_ID"], batch["SLURM_STEP_NUM_TASKS"]
    [(status, output)] = started_by_hand(tmp_path, PROGRAM, [batch])
    assert status == 0 and output.endswith("0 1 28.0\n") and "srun python train.py" in output


def test_several_hosts_meet_at_the_first_of_the_list():
    said = slurm(
        5,
        6,
        SLURM_STEP_NODELIST="gpu[08-09],x1",
        SLURM_STEP_TASKS_PER_NODE="3,2,1",
        SLURM_NODEID="2",
        SLURM_LOCALID="0",
    )
    found = schedulers.told(said).variables
    assert found | {"MASTER_PORT": ""} == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "2", "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "",
    }  # fmt: skip
    other = schedulers.told(said | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).variables
    assert other["MASTER_PORT"] == found["MASTER_PORT"] and other["LOCAL_WORLD_SIZE"] == "3"
    assert schedulers.told(said | {"SLURM_STEP_ID": "1"}).variables["MASTER_PORT"] != found["MASTER_PORT"]
    mine = schedulers.told(said | {"MASTER_ADDR": "a", "MASTER_PORT": "7"})
    assert (mine.variables["MASTER_ADDR"], mine.variables["MASTER_PORT"], mine.lacks) == ("a", "7", "")


@pytest.mark.parametrize("set_by", ["torchrun", "Kubernetes' PyTorchJob", "Ray Train"])
def test_torchs_own_names_come_first(set_by):
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert schedulers.told(said | slurm(1) | open_mpi(1)) == schedulers.Scheduled({})


RAY = """
import os, torch, torch.distributed as dist
# What ray.train.torch does in a worker before the user's function: its own variables, and the group.
dist.init_process_group("gloo", init_method="env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
def train_func():
    import onecard as oc
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["x"])
    x = oc.shard_tensor(torch.arange(8.0), mesh, [oc.Shard(0)])
    print(oc.get_rank(), oc.get_world_size(), x.sum().item(), dist.get_backend())
train_func()
"""


def test_a_worker_of_ray_train_has_its_group_already(tmp_path):
    """Ray's workers have the variables of torch, and a group that Ray made, which is the one that is used."""
    both = [pytorch_job(rank) | {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2"} for rank in (0, 1)]
    assert started_by_hand(tmp_path, RAY, both) == [(0, "0 2 28.0 gloo\n"), (0, "1 2 28.0 gloo\n")]


def test_one_task_needs_nobody():
    assert [schedulers.told(of(0, 1)).variables for of in (slurm, open_mpi, mpich)] == [{}, {}, {}]


# The launcher, by what torchrun takes, and started by a scheduler itself.


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--standalone"], {}),
        (["--standalone", "--nnodes=1", "--nproc-per-node=2"], {"nproc_per_node": 2}),
        (["--nproc_per_node", "cpu"], {"nproc_per_node": len(os.sched_getaffinity(0))}),
        (["--rdzv_backend=c10d", "--rdzv_id", "7", "--rdzv_endpoint", "localhost:0"], {}),
        (
            ["--nnodes", "2:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0", "--node-rank", "1"],
            {"nnodes": 2, "node_rank": 1, "master": "node0:29500"},
        ),
        (
            ["--nnodes", "2", "--master_addr", "node0", "--master_port", "7", "--node_rank=1"],
            {"nnodes": 2, "node_rank": 1, "master": "node0:7"},
        ),
    ],
)
def test_torchruns_options_mean_the_same(tmp_path, monkeypatch, argv, options):
    program = str(tmp_path / write(tmp_path, ""))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    assert parse([*argv, program])[0] == Options(**options)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rdzv_conf", "timeout=3"], "--rdzv_conf is torchrun's: .*ONECARD_TIMEOUT"),
        (["-t", "3"], "-t is torchrun's: each rank writes to its file"),
        (["--standalone", "--nnodes", "2"], "--standalone is for one machine"),
        (
            ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "a:1"],
            "add --node_rank 0 on the machine of a:1",
        ),
        (["--nproc_per_node", "gpu"], "there is no GPU here: --nproc_per_node cpu"),
    ],
)
def test_torchruns_options_that_have_no_meaning_are_named(argv, says):
    with pytest.raises(LaunchError, match=says):
        parse([*argv, __file__])


def test_a_launcher_on_each_host_is_numbered_by_the_scheduler():
    said = slurm(1, SLURM_STEP_NODELIST="a,b", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_NODEID="1", SLURM_LOCALID="0")
    port = schedulers.told(said).variables["MASTER_PORT"]
    assert translated(["--nproc_per_node", "8"], said) == [
        "--nproc_per_node", "8", "--nnodes", "2", "--node_rank", "1", "--master", f"a:{port}",
    ]  # fmt: skip
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
    assert translated([], pod | {"PET_NPROC_PER_NODE": "4", "RANK": "1", "WORLD_SIZE": "2"}) == [
        "--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1", "--master", "job-master-0:23456",
    ]  # fmt: skip
    with pytest.raises(LaunchError, match=r"srun starts 2 launchers on this host.*srun python train\.py"):
        translated([], slurm(1))


# The recipes, by stand-ins of the programs that they call.

RECIPES = Path(__file__).parents[1] / "examples" / "launch"


@pytest.mark.parametrize(
    ("recipe", "environment", "calls"),
    [
        ("slurm_ranks.sh", {}, "srun python train.py --lr 1"),
        ("slurm_launcher.sh", {}, "srun onecard run --nproc_per_node 8 --max_restarts 2 train.py --lr 1"),
        ("mpi.sh", {"RANKS": "4"}, "mpirun -np 4 python train.py --lr 1"),
        (
            "mpi.sh",
            {"RANKS": "4", "HOSTS": "a:2,b:2"},
            "mpirun -np 4 --host a:2,b:2 -x MASTER_ADDR=a -x MASTER_PORT=29500 python train.py --lr 1",
        ),
    ],
)
def test_recipes_call_what_they_say(tmp_path, recipe, environment, calls):
    for name in ("srun", "mpirun"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(RECIPES / recipe), "--lr", "1"], env=path | environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, calls), done.stderr
    words = calls.split()
    if "onecard" in words:
        ours = words[words.index("run") + 1 : words.index("train.py")]
        assert read(ours).nproc_per_node == 8
