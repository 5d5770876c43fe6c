"""What schedulers and MPI's launchers tell a process of the others, in the words of torch's environment (RANK, WORLD_SIZE, ...).

``srun python train.py`` and ``mpirun python train.py`` start ranks as torchrun does, but under names of their own. A program that
does not know them would be many worlds of one, each of which writes as rank 0.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, PORTS = 15000, 15000
"""Ports that are taken where the scheduler says a number of the job, and none of a port: below those that systems give away."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What a process is told: ``variables`` as torchrun would have set them; ``lacks``: what to do where a master is missing;
    ``doubt``: a warning."""

    variables: Mapping[str, str]
    lacks: str = ""
    doubt: str = ""


def told(environment: Mapping[str, str]) -> Scheduled:
    """What the environment of a process says of its rank, under whatever names; nothing where torch's own are set.

    Example:
        >>> told({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        ...       "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-1@1"}).variables["WORLD_SIZE"]
        '2'
        >>> told({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).variables
        {}
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return Scheduled({})
    return _slurm(environment) or _mpi(environment) or Scheduled({})


# -- Slurm -------------------------------------------------------------------------------------------------------------


def _slurm(said: Mapping[str, str]) -> Scheduled | None:
    size = said.get("SLURM_STEP_NUM_TASKS") or said.get("SLURM_NTASKS") or said.get("SLURM_NPROCS") or "1"
    if "SLURM_PROCID" not in said or size == "1":
        return None
    if "SLURM_JOB_ID" in said and "SLURM_STEP_ID" not in said and said["SLURM_PROCID"] == "0":
        # The script of sbatch itself, or a shell of salloc: one process, which knows how many it may start.
        return Scheduled(
            {}, doubt=f"this is one process in a Slurm job of {size} tasks. To run on all of them: srun python train.py"
        )
    host = int(said.get("SLURM_NODEID") or "0")
    names = hosts_of(
        said.get("SLURM_STEP_NODELIST") or said.get("SLURM_JOB_NODELIST") or said.get("SLURM_NODELIST") or ""
    )
    each = tasks_of(said.get("SLURM_STEP_TASKS_PER_NODE") or said.get("SLURM_TASKS_PER_NODE") or "")
    found = {"RANK": said["SLURM_PROCID"], "WORLD_SIZE": size, "LOCAL_RANK": said.get("SLURM_LOCALID", "0")}
    found["GROUP_RANK"] = str(host)
    if host < len(each):
        found["LOCAL_WORLD_SIZE"] = str(each[host])
    elif len(names) == 1:
        found["LOCAL_WORLD_SIZE"] = size
    alone = len(names) == 1 or found.get("LOCAL_WORLD_SIZE") == size
    address = "127.0.0.1" if alone else names[0] if names else ""
    job = f"{said['SLURM_JOB_ID']}.{said.get('SLURM_STEP_ID', '0')}" if "SLURM_JOB_ID" in said else ""
    line = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'
    return _with_master(found, said, address, job, "Slurm", f"{line}; srun python train.py")


def hosts_of(text: str) -> list[str]:
    """The hosts of Slurm's short form, as ``scontrol show hostnames`` lists them.

    Example:
        >>> hosts_of("gpu[08-10,12],login1"), hosts_of("r[1-2]n[1-2]")
        (['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1'], ['r1n1', 'r1n2', 'r2n1', 'r2n2'])
    """
    return [name for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text) for name in _spread(part)]


def _spread(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    return [f"{before}{number}{end}" for number in _numbers(inside) for end in _spread(after)]


def _numbers(text: str) -> list[str]:
    found = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return found


def tasks_of(text: str) -> list[int]:
    """How many tasks each host has, in Slurm's short form.

    Example:
        >>> tasks_of("2(x3),1")
        [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or "1"))]


# -- MPI ---------------------------------------------------------------------------------------------------------------

_MPI = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PMIx", "PMIX_RANK", "PMIX_SIZE", "", ""),
)
_JOBS = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "PMI_JOBID",
    "PMI_PORT",
    "HYDI_CONTROL_FD",
)
_LINES = {
    "Open MPI": "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 -np {} python train.py",
    "MPI": "mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 -n {} python train.py",
}


def _mpi(said: Mapping[str, str]) -> Scheduled | None:
    for name, rank, size, local_rank, local_size in _MPI:
        if rank in said and said.get(size, "1") != "1":
            found = {"RANK": said[rank], "WORLD_SIZE": said[size]}
            if local_rank in said:
                found["LOCAL_RANK"] = said[local_rank]
            if local_size in said:
                found["LOCAL_WORLD_SIZE"] = said[local_size]
            alone = said.get(local_size) == said[size]
            job = next((said[key] for key in _JOBS if key in said), "") if alone else ""
            line = _LINES.get(name, "MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 mpiexec -n {} python train.py")
            return _with_master(found, said, "127.0.0.1" if alone else "", job, name, line.format(said[size]))
    return None


def _with_master(
    found: dict[str, str], said: Mapping[str, str], address: str, job: str, launcher: str, line: str
) -> Scheduled:
    """The same with an address at which the ranks meet: what is set, else the first host and a port made of the job's name."""
    port = str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS) if job else ""
    found["MASTER_ADDR"] = said.get("MASTER_ADDR") or address
    found["MASTER_PORT"] = said.get("MASTER_PORT") or port
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not found[name]]
    for name in missing:
        del found[name]
    lacks = (
        f"{launcher} says that this is rank {found['RANK']} of {found['WORLD_SIZE']}, and not where the ranks can meet: "
        f"{' and '.join(missing)} not set. Start it as: {line}"
    )
    return Scheduled(found, lacks if missing else "")
