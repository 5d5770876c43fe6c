"""The launcher as tests call it: in a rank of the harness, or as a shell does; and which processes are left of it."""

import atexit
import io
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import onecard.launch
from onecard import cli
from onecard.comm.agree import sparse_check
from onecard.comm.base import flight
from onecard.comm.world import world
from onecard.testing import run_ranks
from onecard.testing._run import _context, _importable


def launch_here(folder: Path, argv: list[str], terminal: bool = False) -> tuple[int, str]:
    """Calls the launcher in this process; returns its exit status and all that it wrote."""
    os.chdir(folder)
    target = folder / f"output{os.environ['RANK']}"
    reader, writer = os.openpty() if terminal else (-1, os.open(target, os.O_WRONLY | os.O_CREAT))
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    status = cli.main(["run", *argv])
    return status, os.read(reader, 65536).decode() if terminal else target.read_text()


def launch_node(folder: Path, argv: list[str]) -> tuple[int, str]:
    """Calls the launcher as one of several machines."""
    return launch_here(folder, ["--node_rank", str(dist.get_rank()), *argv])


def launch_forked(folder: Path, argv: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """The same with ranks that are forked from this process.

    A new interpreter imports torch and onecard, which takes longer than most programs here. These ranks have both, in the
    state in which the harness' server imported them, and nothing else of this process: neither its group nor its files.
    Where the start of a rank is what a test is about, it takes `launch_here` or `start`.
    """
    dist.destroy_process_group()
    os.environ |= environment
    subprocess_handler.Popen = Forked  # type: ignore[attr-defined, misc, assignment]
    return launch_here(folder, argv)


def launched(folder: Path, source: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program under the launcher, on two ranks that are forked."""
    argv = ["--nproc_per_node", "2", write(folder, source, "train.py")]
    [found] = run_ranks(launch_forked, 1, folder, argv, environment, timeout=120)
    return found


class Forked:
    """As much of `subprocess.Popen` as torch's agent uses, for a Python program: its process is a copy of this one."""

    def __init__(self, args: Sequence[str], env: dict[str, str], start_new_session: bool, **files: Any) -> None:
        if any(files.values()) or not start_new_session:
            raise NotImplementedError(f"a forked rank leads a session and opens its files itself, but got {files}")
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become([*args[1:]], env)

    def poll(self) -> int | None:
        return self.wait(0) if self.returncode is None else self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() >= until:
                if timeout:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                break
            else:
                time.sleep(0.01)
        return self.returncode


def _become(argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Do in a fork what a new interpreter does with these arguments."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the pipe to the harness: its end is how a rank's end is seen
        os.environ.clear()
        os.environ.update(environment)
        _forget()
        if argv[0] == "-m":
            sys.argv, sys.path[:0] = argv[1:], [""]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = argv, [os.path.dirname(argv[0])]
            names = runpy.run_path(argv[0], run_name="__main__")
            for file in (value for value in names.values() if isinstance(value, io.IOBase)):
                file.close()  # which Python's own end would do
        code = 0
    except SystemExit as request:
        if not (request.code is None or isinstance(request.code, int)):
            print(request.code, file=sys.stderr)
        code = 0 if request.code is None else request.code if isinstance(request.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # not this function
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(code & 0xFF)


def _forget() -> None:
    """What the harness, the launcher and modules that read the environment as they were imported have set."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher's folder is not a rank's to remove
    logging.disable(logging.NOTSET)
    sys.excepthook = sys.__excepthook__
    warnings.resetwarnings()
    warnings.simplefilter("default")
    flight.board.here = None
    world.TIMEOUT = timedelta(seconds=float(os.environ.get("ONECARD_TIMEOUT", "600")))
    sparse_check.obey_environment()
    world.ask_scheduler()


def started_by_hand(
    folder: Path, source: str, environments: Sequence[dict[str, str]], within: float = 120.0
) -> list[tuple[int, str]]:
    """Exit status and output of a program under each of some environments, side by side: no launcher, one fork for each."""
    write(folder, source, "train.py")
    [ends] = run_ranks(_fork_each, 1, folder, list(environments), within, timeout=within + 60)
    return ends


def _fork_each(folder: Path, environments: list[dict[str, str]], within: float) -> list[tuple[int, str]]:
    dist.destroy_process_group()
    os.chdir(folder)
    clean = {name: text for name, text in os.environ.items() if name not in _OF_RANKS and not name.startswith("SLURM_")}
    started = []
    for number, said in enumerate(environments):
        with open(folder / f"output{number}", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        started.append(Forked([sys.executable, "train.py"], clean | said, True))
    until = time.monotonic() + within
    try:
        codes = [process.wait(max(0.01, until - time.monotonic())) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [(code, (folder / f"output{number}").read_text()) for number, code in enumerate(codes)]


def python(folder: Path, *words: Any, within: float = 200.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``python words ...`` does in a folder, by a fork that has imported torch and onecard already.

    The launcher's ranks are forks, too. Where the start of an interpreter is what a test is about, it takes `subprocess`.
    """
    [found] = run_ranks(_python, 1, folder, [*map(str, words)], within, environment, timeout=within + 60)
    return subprocess.CompletedProcess(words, *found)


def _python(folder: Path, words: list[str], within: float, environment: dict[str, str]) -> tuple[int | None, str, str]:
    dist.destroy_process_group()
    os.chdir(folder)
    clean = {name: text for name, text in os.environ.items() if name not in (*_OF_RANKS, "GLOO_SOCKET_IFNAME")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        subprocess_handler.Popen = Forked  # type: ignore[attr-defined, misc, assignment]
        process = Forked([sys.executable, *words], clean | environment, True)
        try:
            code = process.wait(within)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said = [os.pread(number, 1 << 24, 0).decode() for number in (1, 2)]
    return code, *said


_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def by_hand(size: int, **more: str) -> list[dict[str, str]]:
    """The environments of ranks that a user starts by hand on one host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    return [{"RANK": str(rank), **where} for rank in range(size)]


def write(folder: Path, source: str, name: str = "program.py") -> str:
    (folder / name).write_text(textwrap.dedent(source))
    return name


def start(
    folder: Path, source: str, *options: str, temporary: Path | None = None, name: str = "program.py"
) -> subprocess.Popen[str]:
    """Starts the launcher as a shell does, in a process group of its own."""
    command = [sys.executable, "-m", "onecard.launch", *options, write(folder, source, name)]
    environment = os.environ | {
        "PYTHONPATH": str(Path(onecard.launch.__file__).parents[2]),
        "TMPDIR": str(temporary or folder),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0)


class StartedFork:
    """The same in a process group of its own that is forked, with forked ranks; as much of `subprocess.Popen` as tests use."""

    def __init__(self, folder: Path, source: str, *options: str) -> None:
        argv = ["-m", "onecard.launch", *options, write(folder, source)]
        with _importable():
            self._process = _context().Process(target=_start_fork, args=(folder, argv, dict(os.environ)))
            self._process.start()
        self._folder, self.pid = folder, self._process.pid

    def __enter__(self) -> "StartedFork":
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.join(10)

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # type: ignore[arg-type]

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()


def _start_fork(folder: Path, argv: list[str], environment: dict[str, str]) -> None:
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    subprocess_handler.Popen = Forked  # type: ignore[attr-defined, misc, assignment]
    _become(argv, environment)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "(zombie)" not in Path(f"/proc/{pid}/status").read_text() if os.path.exists("/proc") else True


def pids_in(folder: Path, count: int) -> list[int]:
    """Waits until `count` processes have noted themselves in `folder` as files pid*."""
    deadline = time.monotonic() + 120
    while len(found := [text for path in folder.glob("pid*") if (text := path.read_text())]) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return [int(text) for text in found]


def survivors(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]
