"""One rank of `run_ranks`: set the process up, run the function, report how it ended."""

from __future__ import annotations

import faulthandler
import linecache
import multiprocessing
import os
import pickle
import re
import reprlib
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType

from onecard.testing._job import RankJob, RankReport, opened, pack
from onecard.testing._report import is_consequence

DUMP_SIGNAL = signal.SIGUSR1
SETUP_MARGIN = 30.0  # seconds: the harness' own time-out, which explains more, must come before the backend's
WATCH = "onecard-watch"


def main(job: RankJob, pipe: Connection) -> None:
    """Entry point of a rank process. Ends the process with status 0 after the parent's release."""
    multiprocessing.set_start_method(None, force=True)  # not the harness' own: a DataLoader's workers start as usual
    os.setsid()  # its own process group: one signal ends it with all that it started, and Ctrl-C goes to the parent
    released = threading.Event()
    threading.Thread(target=_watch, args=(job.folder, pipe, released), name=WATCH, daemon=True).start()
    _redirect(job.path("out"))
    # Kept referenced for the life of the process: faulthandler writes to the file's descriptor.
    stack = open(job.path("stack"), "w")  # noqa: SIM115
    faulthandler.register(DUMP_SIGNAL, stack, all_threads=True)
    report = _outcome(job)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(report))
    # Leaving now would break the connections of ranks still at work: they would report the loss, not their own fault.
    released.wait()
    _close_group()


def _watch(folder: str, pipe: Connection, released: threading.Event) -> None:
    """Ends this rank and its children as soon as the parent has gone, however it went."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # the parent, had it been able to, would have removed it
        os.killpg(0, signal.SIGKILL)
    released.set()


def _redirect(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # After the fork, Python's own streams may be pytest's or buffered for a terminal.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _outcome(job: RankJob) -> RankReport:
    from onecard.comm.agree import sparse_check
    from onecard.comm.base import flight

    try:
        _set_environment(job)
        sparse_check.obey_environment()
        flight.board.here = flight.Board.create(job.path("board"))
        _open_group(job)
        function, args, kwargs = opened(job)
        value = pack(f"the return value of {job.where.qualname}", function(*args, **kwargs))
    except BaseException as error:
        return _failure(error)
    return RankReport("done", time.monotonic(), value=value, counts=flight.board.here.counts)


def _failure(error: BaseException) -> RankReport:
    now = time.monotonic()
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, outcomes.Skipped):
        return RankReport("skip", now, text=str(error))
    own = error.__traceback__.tb_next if error.__traceback__ else None
    error = error.with_traceback(own or error.__traceback__)
    text = "".join(traceback.format_exception(error)) + _values_of_assert(error)
    lost = not isinstance(error, AssertionError) and is_consequence(str(error))
    return RankReport("error", now, text=text, consequence=lost)


def _values_of_assert(error: BaseException) -> str:
    """Lists the variables of a failing bare `assert`: pytest rewrites asserts only in its own process."""
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if not isinstance(error, AssertionError) or last is None:
        return ""
    summary = traceback.extract_tb(last)[0]
    numbers = range(summary.lineno or 0, (summary.end_lineno or summary.lineno or 0) + 1)
    source = "".join(linecache.getline(summary.filename, number) for number in numbers)
    if not source.lstrip().startswith("assert"):
        return ""
    values = last.tb_frame.f_locals
    names = dict.fromkeys(name for name in re.findall(r"[A-Za-z_]\w*", source) if name in values)
    return "".join(f"  where {name} = {reprlib.repr(values[name])}\n" for name in names)


def _set_environment(job: RankJob) -> None:
    import torch

    os.environ.clear()  # the fork server keeps the environment of its own start
    os.environ.update(job.environment)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.nproc))
    os.environ.update(LOCAL_RANK=str(job.rank), LOCAL_WORLD_SIZE=str(job.nproc))
    torch.set_num_threads(1)  # ranks share the cores, and forked OpenMP pools are not to be trusted
    if "nccl" in job.backend:  # otherwise CUDA need not start, at half a second a rank
        torch.cuda.set_device(job.rank)
    warnings.simplefilter("error")
    for module in (r"torch\b.*", r"multiprocessing\b.*"):
        warnings.filterwarnings("default", module=module)  # theirs to repair
    # Python 3.12 on says so of every fork, for example of a DataLoader's worker: the second thread is ours.
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    warnings.filterwarnings("ignore", ".*nothing is divided along", UserWarning)  # a test may want the whole batch
    warnings.filterwarnings("ignore", r".*rank\(s\) .* have no parameter", UserWarning)  # its models are small


def _open_group(job: RankJob) -> None:
    import torch.distributed as dist

    from onecard.testing import _torch_board

    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.folder}/store",
        rank=job.rank,
        world_size=job.nproc,
        timeout=timedelta(seconds=job.timeout + SETUP_MARGIN),
    )
    _torch_board.watch()


def _close_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
