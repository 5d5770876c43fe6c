"""`onecard run`: from the command line to an exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from onecard.launch._agent import Agent, Workplace, make_agent
from onecard.launch._options import LaunchError, Options, Target, endpoint, gpu_list, parse
from onecard.testing._job import Report
from onecard.testing._report import Death, is_consequence, root_cause

TAIL = 20  # lines of a log shown for a rank that left no traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program named on the command line (by default sys.argv) and returns its exit status.

    The status is that of the first rank that failed; 2 for a wrong command line; 128 plus the number of the signal
    that ended a rank or the launcher itself.
    """
    try:
        options, target = parse(sys.argv[1:] if argv is None else argv)
        nproc, environment = plan(options)
        options.log_dir.mkdir(parents=True, exist_ok=True)
        return run(options, target, nproc, environment)
    except LaunchError as error:
        _say(str(error))
    except OSError as error:
        _say(f"{error.filename or options.log_dir}: {error.strerror}")
    return 2


def plan(options: Options) -> tuple[int, dict[str, str]]:
    """Returns the number of ranks on this machine and what their environment gets. Raises LaunchError."""
    gpus, available = gpu_list(options), torch.cuda.device_count()
    nproc = options.nproc_per_node or len(gpus) or max(1, available)
    environment = {"PYTHONUNBUFFERED": "1"}
    if gpus and available:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(gpus, available)
    elif gpus:
        _say(f"no GPU here: --gpus {options.gpus} starts {nproc} ranks on the CPU")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    host = endpoint(options.master)[0] if options.master else "127.0.0.1"
    if options.nnodes == 1 or host in ("127.0.0.1", "localhost", "::1"):
        defaults["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return nproc, environment | {name: text for name, text in defaults.items() if name not in os.environ}


def _visible(gpus: list[int], available: int) -> str:
    """The GPUs for CUDA_VISIBLE_DEVICES: all of them for every rank, so that LOCAL_RANK is an index into them."""
    if max(gpus) >= available:
        raise LaunchError(f"--gpus names GPU {max(gpus)}, but there are {available}, numbered from 0")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(available)]
    return ",".join(names[gpu] for gpu in gpus)


def run(options: Options, target: Target, nproc: int, environment: Mapping[str, str]) -> int:
    """Runs all ranks of this machine to their end and returns the exit status."""
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    logging.disable(logging.CRITICAL)  # the agent logs each of its steps; what matters is said here
    if options.nnodes == 1:
        for stale in options.log_dir.glob("rank*.log"):
            stale.unlink()
    with tempfile.TemporaryDirectory(prefix="onecard-", ignore_cleanup_errors=True) as notes:
        workplace = Workplace(options.log_dir, Path(notes), environment)
        agent = make_agent(options, target, nproc, workplace)
        try:
            failures = agent.run().failures
        except SignalException as interruption:
            _end_for_good(agent, workplace)
            _say(f"{interruption.sigval.name}: all ranks were ended")
            return 128 + interruption.sigval
        except BaseException:
            _end_for_good(agent, workplace)
            raise
        if failures:
            agent.kill()
        workplace.close()
        return _explain(failures, workplace) if failures else 0


def _end_for_good(agent: Agent, workplace: Workplace) -> None:
    """Kills all ranks; a second Ctrl-C, of an impatient user, must not stop this."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    agent.kill()
    workplace.close()


def _explain(failures: Mapping[int, ProcessFailure], workplace: Workplace) -> int:
    """Shows the first failure, last on the terminal, and returns its exit status."""
    ends = {rank: end for rank, end in _ends(failures, workplace).items() if end is not None}
    first = root_cause(ends)
    assert first is not None
    log, end = workplace.log(first), ends[first]
    # A rank that noted its own end may have been ended by the agent while it was leaving.
    code = end.code if isinstance(end, Report) else failures[first].exitcode
    if isinstance(end, Report) and end.text:
        how, text = f"failed first, with exit code {code}", end.text.rstrip()
    else:
        how = str(Death(code, 0.0)) if code < 0 else f"ended first, with exit code {code}"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        text = "\n".join(["The end of its log:", *lines[-TAIL:]]) if lines else "It had printed nothing."
    _say(f"rank {first} {how}; its log is {log}\n\n{text}")
    return code if code > 0 else 128 - code


def _ends(failures: Mapping[int, ProcessFailure], workplace: Workplace) -> dict[int, Report | Death | None]:
    """How each failed rank ended; None for one that the agent itself ended because of another."""
    ends: dict[int, Report | Death | None] = {}
    others = {failure.exitcode for failure in failures.values()}
    for rank, failure in failures.items():  # in the order in which the agent noticed them
        try:
            note = json.loads(workplace.note(rank).read_text())
        except (OSError, ValueError):
            # A rank that SIGTERM ended is the agent's doing, if another rank ended in any other way.
            by_agent = failure.exitcode == -signal.SIGTERM and bool(others - {-signal.SIGTERM})
            # Noticed at the agent's next look only: any error that a rank noted itself was earlier.
            ends[rank] = None if by_agent else Death(failure.exitcode, float("inf"))
        else:
            lost = is_consequence(note["text"].rstrip().rpartition("\n")[2])
            ends[rank] = Report("error", note["time"], text=note["text"], consequence=lost, code=note["code"])
    return ends


def _say(text: str) -> None:
    print(f"onecard: {text}", file=sys.stderr, flush=True)
