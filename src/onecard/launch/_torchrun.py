"""Options of torchrun's command line in those of ``onecard run``: what has a meaning here is taken, what has none is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from onecard.comm.world import schedulers
from onecard.launch._wrong import LaunchError

LONE = frozenset({"h", "help", "standalone", "no_python", "run_path", "virtual_local_rank", "module", "json"})
"""Options without a value."""

_HERE = ("nproc_per_node", "nnodes", "node_rank", "log_dir", "max_restarts")
_UNHEARD = {
    "rdzv_conf": "time-outs of torchrun's rendezvous. Here: --wait SECONDS for machines, ONECARD_TIMEOUT for ranks",
    "no_python": "the script is a Python file, or a module by -m",
    "run_path": "a script runs as python runs it: leave it out",
    "module": "write -m module in the place of the script",
    "redirects": "each rank writes to its file in --log_dir, and rank 0 to the terminal, too: leave it out",
    "tee": "each rank writes to its file in --log_dir, and rank 0 to the terminal, too: leave it out",
    "role": "ranks have no roles here: leave it out",
    "start_method": "ranks are new processes: leave it out",
    "local_addr": "an address of machine 0 goes into --master HOST:PORT; GLOO_SOCKET_IFNAME names an interface",
    "monitor_interval": "ranks are looked at 20 times a second: leave it out",
}
_SHORT = {"r": "redirects", "t": "tee"}


def translated(ours: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """A command line's options with torchrun's in our words, and what the environment says of machines.

    That is torchrun's own PET_..., and Slurm's, where it starts one launcher on each host.

    Raises:
        LaunchError: an option of torchrun's that has no meaning here; says what has.

    Example:
        >>> translated(["--standalone", "--nproc_per_node=2", "--rdzv_backend", "c10d"], {})
        ['--nproc_per_node', '2']
        >>> translated(["--nnodes", "2", "--rdzv-endpoint", "node0", "--node_rank", "1"], {})
        ['--nnodes', '2', '--node_rank', '1', '--master', 'node0:29500']
    """
    kept: list[str] = []
    said: dict[str, str] = {}
    words = list(ours)
    while words:
        word, equals, value = words.pop(0).partition("=")
        name = word.lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name) if word[:2] != "--" else name
        if name in _UNHEARD:
            raise LaunchError(f"{word} is torchrun's: {_UNHEARD[name]}")
        given = value if equals else "" if name in LONE or not words else words.pop(0)
        if name in _OURS_OR_TORCHS:
            said[name] = given
        else:
            kept += [word] if name in LONE else [word, given] if given or equals else [word]
    return [*kept, *_ours(_from_environment(said, environment), "c10d" in said.get("rdzv_backend", ""))]


_OURS_OR_TORCHS = frozenset(
    {"standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "master", *_HERE}
)


def _from_environment(said: dict[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What is not on the command line: torchrun's variables, as Kubernetes' PyTorchJob sets them, and Slurm's."""
    found = {name: environment[f"PET_{name.upper()}"] for name in _PET if environment.get(f"PET_{name.upper()}")} | said
    if "standalone" in said or "nnodes" in found or "TORCHELASTIC_RESTART_COUNT" in environment:
        return found
    slurm = {name: text for name, text in environment.items() if name.startswith(("SLURM_", "MASTER_"))}
    told = schedulers.told(slurm)
    if told.lacks:
        raise LaunchError(told.lacks)
    if not told.variables:
        return found
    if told.variables.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"srun starts {told.variables['LOCAL_WORLD_SIZE']} launchers on this host, each of which would start ranks. Either "
            "let it start one: srun --ntasks-per-node=1 onecard run --nproc_per_node N train.py; or let it start the ranks "
            "themselves: srun python train.py"
        )
    where = f"{told.variables['MASTER_ADDR']}:{told.variables['MASTER_PORT']}"
    return {"nnodes": told.variables["WORLD_SIZE"], "node_rank": told.variables["RANK"], "master": where} | found


_PET = ("nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "master_addr", "master_port", "max_restarts")


def _ours(said: dict[str, str], dynamic: bool) -> list[str]:
    options = {name: said[name] for name in _HERE if name in said}
    nnodes = options.get("nnodes", "1")
    if ":" in nnodes:
        fewest, _, most = nnodes.partition(":")
        if fewest != most:
            raise LaunchError(
                f"--nnodes is {nnodes!r}; write a number: machines do not come and go here: --nnodes {most}"
            )
        options["nnodes"] = nnodes = most
    if "standalone" in said and nnodes != "1":
        raise LaunchError(f"--standalone is for one machine, and --nnodes is {nnodes}: leave one of the two out")
    if options.get("nproc_per_node") in _COUNTS:
        options["nproc_per_node"] = str(_COUNTS[options["nproc_per_node"]]())
    master = said.get("master") or said.get("rdzv_endpoint", "")
    master = master or (f"{said['master_addr']}:{said.get('master_port', '29500')}" if "master_addr" in said else "")
    if master and nnodes != "1":
        options["master"] = master if ":" in master else f"{master}:29500"
        if dynamic and "node_rank" not in options:
            raise LaunchError(
                "--rdzv_backend c10d numbers the machines by itself; here each says its own: add --node_rank 0 on the machine of "
                f"{options['master']}, --node_rank 1 on the next"
            )
    elif "master" in said:
        options["master"] = said["master"]
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _gpus() -> int:
    if not torch.cuda.device_count():
        raise LaunchError(
            "--nproc_per_node is 'gpu', and there is no GPU here: --nproc_per_node cpu, or a number. Without it there is one "
            "rank for each GPU, or 1"
        )
    return torch.cuda.device_count()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_COUNTS: dict[str, Callable[[], int]] = {
    "gpu": _gpus,
    "cpu": _cores,
    "auto": lambda: torch.cuda.device_count() or _cores(),
}
