"""`onecard run`: from the command line to an exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException

from onecard.comm.world import interface
from onecard.launch._agent import Agent, Workplace, make_agent
from onecard.launch._allocator import allocator
from onecard.launch._explain import Ended, explain
from onecard.launch._guard import SessionGuard
from onecard.launch._logs import job_folder, set_aside
from onecard.launch._machines import MachineLost
from onecard.launch._memory import MemoryKills
from onecard.launch._options import LaunchError, Options, Target, endpoint, gpu_list, parse, ranks_behind
from onecard.launch._say import say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program named on the command line (by default sys.argv) and returns its exit status.

    The status is that of the first rank that failed; 2 for a wrong command line; 128 plus the number of the signal
    that ended a rank or the launcher itself.
    """
    try:
        options, target = parse(sys.argv[1:] if argv is None else argv)
        nproc, environment = plan(options)
        if options.nproc_per_node is None and (behind := ranks_behind(target)):
            works = f"onecard run {behind} {target.name}"
            say(
                f"{behind} stands behind {target.name}, so that it is the script's own and {nproc} rank starts: {works}"
            )
        with job_folder(options.log_dir, shared=options.nnodes > 1) as folder:
            if folder != options.log_dir:
                say(f"a job that runs has its logs in {options.log_dir}; those of this one are in {folder}")
            return _answered(replace(options, log_dir=folder), target, nproc, environment)
    except LaunchError as error:
        say(str(error))
    except OSError as error:
        say(f"{error.filename or options.log_dir}: {error.strerror}")
    return 2


def _answered(options: Options, target: Target, nproc: int, environment: Mapping[str, str]) -> int:
    """The exit status; with ``--json`` how the job ended is the last line of standard output."""
    begin = time.monotonic()
    ended, restarts = run(options, target, nproc, environment)
    if options.json:
        said = {
            "status": ended.status,
            "ranks": nproc * options.nnodes,
            "node_rank": options.node_rank,
            "restarts": restarts,
            "seconds": round(time.monotonic() - begin, 3),
            "logs": str(options.log_dir),
            "failed": None
            if not ended.status
            else {"rank": ended.rank, "why": ended.why, "log": ended.log and str(ended.log)},
        }
        print(json.dumps(said), flush=True)
    return ended.status


def plan(options: Options) -> tuple[int, dict[str, str]]:
    """Returns the number of ranks on this machine and what their environment gets. Raises LaunchError."""
    gpus, available = gpu_list(options), torch.cuda.device_count()
    nproc = options.nproc_per_node or len(gpus) or max(1, available)
    environment = {"PYTHONUNBUFFERED": "1"}
    if gpus and available:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(gpus, available)
    elif gpus:
        say(f"no GPU here: --gpus {options.gpus} starts {nproc} ranks on the CPU")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    host = endpoint(options.master)[0] if options.master else "127.0.0.1"
    if options.nnodes == 1:
        host = "127.0.0.1"
    if name := interface.towards(host):
        defaults["GLOO_SOCKET_IFNAME"] = name
    if not available:
        environment |= allocator(os.environ)
    return nproc, environment | {name: text for name, text in defaults.items() if name not in os.environ}


def _visible(gpus: list[int], available: int) -> str:
    """The GPUs for CUDA_VISIBLE_DEVICES: all of them for every rank, so that LOCAL_RANK is an index into them."""
    if max(gpus) >= available:
        raise LaunchError(f"--devices names GPU {max(gpus)}, but there are {available}, numbered from 0")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(available)]
    return ",".join(names[gpu] for gpu in gpus)


def run(options: Options, target: Target, nproc: int, environment: Mapping[str, str]) -> tuple[Ended, int]:
    """Runs all ranks of this machine to their end; returns how they ended, and how often all were started again."""
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    logging.disable(logging.CRITICAL)  # the agent logs each of its steps; what matters is said here
    if options.nnodes == 1:
        set_aside(sorted(options.log_dir.glob("rank*.log")))
    memory = MemoryKills()
    with (
        tempfile.TemporaryDirectory(prefix="onecard-", ignore_cleanup_errors=True) as notes,
        SessionGuard(notes) as guard,
    ):
        workplace = Workplace(options.log_dir, Path(notes), environment, guard)
        agent = make_agent(options, target, nproc, workplace)
        try:
            failures = agent.run().failures
        except SignalException as interruption:
            _end_for_good(agent, workplace)
            if agent.machines is not None:
                agent.machines.end(f"{interruption.sigval.name} ended it")
            why = f"{interruption.sigval.name}: all ranks were ended"
            say(why)
            return Ended(128 + interruption.sigval, why=why), workplace.attempt
        except MachineLost as lost:
            _end_for_good(agent, workplace)
            why = f"{lost}. All ranks here were ended"
            say(why)
            return Ended(1, why=why), workplace.attempt
        except BaseException:
            _end_for_good(agent, workplace)
            raise
        if failures:
            agent.kill()
        workplace.close()
        if failures:
            return explain(failures, workplace, memory.seen(), agent.machines), workplace.attempt
        if agent.machines is not None:
            agent.machines.end()
        return Ended(0), workplace.attempt


def _end_for_good(agent: Agent, workplace: Workplace) -> None:
    """Kills all ranks; a second Ctrl-C, of an impatient user, must not stop this."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    agent.kill()
    workplace.close()
