"""The parent's side of a multi-rank run: start the ranks, wait, release or end them all, say what happened."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from onecard.comm.base import flight
from onecard.comm.world.world import default_backend
from onecard.testing import _guard, _rank, _report
from onecard.testing._job import RankJob, RankReport, enclosed
from onecard.testing._output import RankOutput
from onecard.testing._report import Death, RankError

GRACE = 0.2  # seconds after a failure in which the others may report an earlier one
EXIT_GRACE = 10.0  # seconds for a released rank to close its process group
POLL = 0.25  # seconds between looks at what rank 0 prints, and at the flight boards once a rank has returned
DUMP_GRACE = 2.0  # seconds for a rank to write its stack


def run_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `nproc` ranks of a real process group and returns each rank's value.

    The ranks are processes of this host, forked from a server that has imported torch already. `function` must be
    defined at the top level of a module, or in a notebook's cell (which takes cloudpickle: it is sent as it is then, with
    what it uses of other cells); arguments and return values are copied between processes. In a script, call
    it below `if __name__ == "__main__":`, because the ranks import the script. `timeout` is in seconds for all of
    `function`; `backend` is a name for `init_process_group`, by default that of `comm.world.default_backend`. Warnings in
    a rank are errors. What rank 0 prints appears line by line as it comes, what the others print, rank by rank, when the
    run is over.

    Raises RankError with the traceback of the rank that failed first; RankTimeout, with the stack of each rank and
    who is missing from which collective, if a rank does not finish; ValueError or TypeError, before anything starts,
    for a function or an argument that cannot be sent to a rank.
    """
    _guard.leave_if_importing()
    if nproc < 1:
        raise ValueError(f"nproc is {nproc}; a run needs at least one rank: run_ranks(function, 2)")
    where, arguments = enclosed(function, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="onecard-", ignore_cleanup_errors=True) as folder:
        environment = dict(os.environ)
        jobs = [
            RankJob(where, arguments, rank, nproc, folder, timeout, backend or default_backend(), environment)
            for rank in range(nproc)
        ]
        crew = _Crew(where.qualname, jobs)
        try:
            crew.start()
            values = crew.run(timeout)
        finally:
            crew.end()
            crew.show_output()
    return values


@dataclass
class _Rank:
    job: RankJob
    process: ForkServerProcess
    pipe: Connection


class _Crew:
    """The ranks of one run and what is known of how each ended."""

    def __init__(self, what: str, jobs: list[RankJob]) -> None:
        self.what = what
        self.jobs = jobs
        self.ranks: list[_Rank] = []
        self.ends: dict[int, RankReport | Death] = {}
        self.outputs = [RankOutput(job) for job in jobs]

    def start(self) -> None:
        context = _context()
        for job in self.jobs:
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank.main, args=(job, theirs), name=f"{_guard.RANK_NAME}{job.rank}")
            self.ranks.append(_Rank(job, process, mine))
            with theirs, _importable():
                process.start()

    def run(self, timeout: float) -> list[Any]:
        """Returns the values of the ranks, or raises what went wrong first."""
        deadline = time.monotonic() + timeout
        while len(self.ends) < len(self.ranks) and not self._failed():
            left = deadline - time.monotonic()
            if left <= 0:
                raise _report.timeout(self.what, timeout, self._running(), *self._scene(), time.monotonic())
            self._collect(min(left, POLL))
            self.outputs[0].show()
            self._check_overtaken()
        if self._failed():
            if any(map(_guard.is_missing, self.ends.values())):
                raise RankError(_guard.explain())
            self._collect_for(GRACE)
            raise _report.failure(self.what, len(self.ranks), self.ends, self._boards())
        self._release()
        reports = [self.ends[rank.job.rank] for rank in self.ranks]
        _skip_if_asked(reports)
        return [pickle.loads(report.value) for report in reports if isinstance(report, RankReport)]

    def _collect(self, seconds: float) -> None:
        """Waits up to `seconds` for news and notes it."""
        pending = {rank.pipe: rank for rank in self.ranks if rank.job.rank not in self.ends}
        for pipe in wait(list(pending), seconds):
            rank = pending[pipe]  # type: ignore[index]
            try:
                self.ends[rank.job.rank] = pickle.loads(rank.pipe.recv_bytes())
            except (EOFError, OSError):
                now = time.monotonic()
                rank.process.join(EXIT_GRACE)  # its pipe closes a moment before the fork server passes its status on
                arrived = Path(rank.job.path("out")).exists()
                self.ends[rank.job.rank] = Death(rank.process.exitcode or 0, now, arrived)

    def _collect_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.ends) < len(self.ranks) and (left := deadline - time.monotonic()) > 0:
            self._collect(left)

    def _failed(self) -> bool:
        return _report.root_cause(self.ends) is not None

    def _running(self) -> list[int]:
        return [rank.job.rank for rank in self.ranks if rank.job.rank not in self.ends]

    def _boards(self) -> dict[int, flight.FlightEntry]:
        boards = {}
        for job in self.jobs:
            with suppress(OSError, ValueError):
                boards[job.rank] = flight.read(job.path("board"))
        return boards

    def _check_overtaken(self) -> None:
        counts: Mapping[int, Any] = {r: end.counts for r, end in self.ends.items() if isinstance(end, RankReport)}
        running = self._running()
        if not counts or not running or self._failed():
            return
        boards = self._boards()
        missing = {m for r in running if r in boards for m in flight.overtaken(boards[r], counts)}
        if missing:
            raise _report.deadlock(self.what, sorted(missing), *self._scene(), time.monotonic())

    def _scene(self) -> tuple[dict[int, flight.FlightEntry], dict[int, str]]:
        """The boards and the stacks of the ranks that still run."""
        boards = self._boards()
        running = [rank for rank in self.ranks if rank.job.rank not in self.ends]
        for rank in running:
            # Not before it listens: the signal would kill it.
            if Path(rank.job.path("stack")).exists() and rank.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, _rank.DUMP_SIGNAL)
        return boards, {rank.job.rank: _read_stack(rank.job.path("stack")) for rank in running}

    def _release(self) -> None:
        for rank in self.ranks:
            with suppress(OSError):
                rank.pipe.send_bytes(b"")
        deadline = time.monotonic() + EXIT_GRACE
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            code = rank.process.exitcode
            if code != 0:
                how = "hung" if code is None else str(Death(code, 0.0))
                text = f"{self.what}: rank {rank.job.rank} {how} while it closed its process group"
                raise RankError(text, rank.job.rank, code)

    def end(self) -> None:
        """Ends every rank and whatever it started. Never waits for a rank's consent."""
        for rank in self.ranks:
            pid = rank.process.pid
            if pid is not None and rank.process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                rank.process.kill()  # should it have died before it had its own group
        for rank in self.ranks:
            if rank.process.pid is not None:
                rank.process.join(EXIT_GRACE)
                rank.process.close()
            rank.pipe.close()

    def show_output(self) -> None:
        for output in self.outputs:
            output.show(rest=True)


def _skip_if_asked(reports: list[RankReport | Death]) -> None:
    for report in reports:
        if isinstance(report, RankReport) and report.kind == "skip":
            import pytest  # the rank raised pytest's Skipped

            pytest.skip(report.text)


def _read_stack(path: str) -> str:
    """Waits until the stack is written and returns it, innermost call last, without the harness' own thread."""
    deadline, text, before = time.monotonic() + DUMP_GRACE, "", None
    while time.monotonic() < deadline and (not text or text != before):
        time.sleep(0.05)
        with suppress(OSError):
            before, text = text, Path(path).read_text(errors="replace")
    return _report.WATCH_THREAD.sub("", text).strip() or "(no answer: the process is stopped, or still starting)"


_wanted: list[str] = []


def preload(*modules: str) -> None:
    """Names modules that are imported once, for all ranks of all later runs, instead of by each rank that needs them.

    For what takes long to import, such as ``"transformers.modeling_utils"``. Call it before the first run, in a
    ``conftest.py`` for example; a module that is not installed is left to the ranks. Raises RuntimeError once ranks have
    been started: the server that they are forked from has imported what it imports.
    """
    if _context.cache_info().currsize:
        raise RuntimeError(f"ranks have been started before preload{modules!r}: call it before the first run")
    _wanted.extend(modules)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The loaded ones of these are needed by test modules; importing them in each rank would cost more than the test.
    loaded = [name for name in ("pytest", "hypothesis") if name in sys.modules]
    context.set_forkserver_preload(
        ["onecard.testing", "onecard._on_demand", *loaded, *_wanted, "onecard.testing._preload"]
    )
    return context


@contextmanager
def _importable() -> Iterator[None]:
    """Gives the fork server, if it starts now, this process' import path, and one thread for each maths library."""
    # Python 3.11 drops the path it says it passes on; OpenMP and OpenBLAS read the environment when they are loaded.
    # Each rank reads ONECARD_CHECK for itself, when it begins.
    extra = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "ONECARD_CHECK": ""}
    extra |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
