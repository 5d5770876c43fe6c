"""Two hosts on one machine: namespaces of Linux with a cable (a veth pair) between them, made and dropped by a test.

Each has its own network, name, /etc/hosts, /dev/shm and processes, and nothing else of its own. Programs are forked from the
harness' server, so that no interpreter has to start. Needs root; where namespaces cannot be made, tests skip.
"""

import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import launching
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from onecard import cli
from onecard.testing import run_ranks

NEW_MOUNTS, NEW_NAME, NEW_PIDS, NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
PRIVATE, RECURSIVE, BIND = 1 << 18, 1 << 14, 1 << 12
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("alpha", "beta")
PORT = 29500
LOOPBACK = "127.0.0.1 localhost\n"
ETC_HOSTS = {
    "good": [LOOPBACK + "10.77.0.1 alpha\n10.77.0.2 beta\n"] * 2,
    # Debian gives a host's own name to loopback; the other's is known.
    "Debian": [f"{LOOPBACK}127.0.1.1 {me}\n{there} {other}\n" for me, there, other in
               (("alpha", "10.77.0.2", "beta"), ("beta", "10.77.0.1", "alpha"))],
    "nobody": [LOOPBACK] * 2,
}  # fmt: skip


def on_two_hosts(
    scene: Callable[..., Any], folder: Path, *given: Any, etc: str = "good", timeout: float = 150.0
) -> Any:
    """What ``scene(hosts, *given)`` returns: it is called in a process of its own, with two hosts that end with it."""
    [found] = run_ranks(_play, 1, scene, folder, given, etc, timeout=timeout)
    return found


def _play(scene: Callable[..., Any], folder: Path, given: Sequence[Any], etc: str) -> Any:
    dist.destroy_process_group()
    _unshare(NEW_NETWORK)  # the cable lies in a network of its own, which ends with this process
    hosts = [Host(folder, number, etc) for number in (0, 1)]
    try:
        ends = ["oc-a", "oc-b"]
        _run(_ip(), "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _run(_ip(), "link", "set", end, "netns", str(host.pid))
            host.ask("network", end)
        return scene(hosts, *given)
    finally:
        for host in hosts:
            host.end()


class Host:
    """A host, to the process that plays the scene."""

    def __init__(self, folder: Path, number: int, etc: str) -> None:
        self.folder, self.number = folder / NAMES[number], number
        self.folder.mkdir()
        (self.folder / "etc_hosts").write_text(ETC_HOSTS[etc][number])
        self._pipe, theirs = Pipe()
        ready, told = os.pipe()
        self._outer = os.fork()
        if not self._outer:
            _be_host(self, theirs, told)
        self.pid = int(os.read(ready, 32))

    def end(self) -> None:
        """With its first process, all of a namespace end. The end of the scene alone would end none: each host has a copy
        of both pipes, so that neither is ever closed."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self._outer, 0)

    def ask(self, what: str, *given: Any) -> Any:
        """Have it do something, and wait for the answer."""
        self._pipe.send((what, given))
        answer, fault = self._pipe.recv()
        if fault:
            raise AssertionError(f"{NAMES[self.number]}: {fault}")
        return answer

    def launch(self, argv: Sequence[str], source: str, environment: Mapping[str, str] | None = None) -> None:
        """Start ``onecard run`` with these options."""
        launching.write(self.folder, source, "train.py")
        self.ask("start", [*argv, "train.py"], dict(environment or {}))

    def wait(self, seconds: float) -> tuple[int | None, str, float]:
        """The launcher's exit status (None: it runs on), what it said, and after how many seconds from now."""
        begin = time.monotonic()
        code = self.ask("wait", seconds)
        return code, (self.folder / "output").read_text(), time.monotonic() - begin

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""


# -- in the host -------------------------------------------------------------------------------------------------------


def _be_host(host: Host, pipe: Connection, told: int) -> NoReturn:
    try:
        _unshare(NEW_MOUNTS | NEW_NAME | NEW_PIDS | NEW_NETWORK)
        pid = os.fork()  # the first process in the new namespace of processes: when it ends, all of the host do
        if pid:
            os.write(told, str(pid).encode())
            os._exit(os.waitpid(pid, 0)[1] and 1)
        _die_with_parent()
        _mount("", "/", PRIVATE | RECURSIVE)
        _mount(str(host.folder / "etc_hosts"), "/etc/hosts", BIND)
        _mount("proc", "/proc", 0, "proc")
        _mount("tmpfs", "/dev/shm", 0, "tmpfs")
        socket.sethostname(NAMES[host.number])
        os.chdir(host.folder)
        _serve(host, pipe)
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(host: Host, pipe: Connection) -> None:
    started = [0]
    while True:
        what, given = pipe.recv()
        try:
            pipe.send((_DOES[what](host, started, *given), ""))
        except EOFError:
            raise
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _network(host: Host, _: list[int], end: str) -> None:
    _run(_ip(), "link", "set", "lo", "up")
    _run(_ip(), "link", "set", end, "name", "eth7")
    _run(_ip(), "addr", "add", f"{ADDRESSES[host.number]}/24", "dev", "eth7")
    _run(_ip(), "link", "set", "eth7", "up")


def _start(host: Host, started: list[int], argv: list[str], environment: dict[str, str]) -> int:
    started[0] = os.fork()
    if not started[0]:
        code = 1
        try:
            os.setsid()
            output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(output, number)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
                os.environ.pop(name, None)
            os.environ |= environment
            subprocess_handler.Popen = launching.Forked  # type: ignore[attr-defined, misc, assignment]
            if version := environment.get("PRETENDED_VERSION"):
                sys.modules["onecard.launch._machines"].VERSION = version  # type: ignore[attr-defined]
            code = cli.main(["run", *argv])
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return started[0]


def _wait(host: Host, started: list[int], seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == started[0]:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01 if not pid else 0)
    return None


def _kill(host: Host, started: list[int], rank: int | None, number: int = signal.SIGKILL) -> None:
    """The launcher, or the process that a rank noted in ``pidRANK``."""
    os.kill(started[0] if rank is None else int((host.folder / f"pid{rank}").read_text()), number)


def _command(host: Host, _: list[int], *words: str) -> str:
    return _run(*words)


def _cable(host: Host, _: list[int], state: str) -> None:
    _run(_ip(), "link", "set", "eth7", state)


def _sent(host: Host, _: list[int]) -> int:
    """Bytes that have left by the cable."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth7":
            return int(rest.split()[8])
    raise RuntimeError("no cable")


def _slow(host: Host, _: list[int], rate: str) -> None:
    _run(tc(), "qdisc", "replace", "dev", "eth7", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")


_DOES: dict[str, Callable[..., Any]] = {
    "network": _network, "start": _start, "wait": _wait, "kill": _kill, "run": _command, "cable": _cable, "slow": _slow,
    "sent": _sent,
}  # fmt: skip


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if _libc().unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def _mount(source: str, target: str, flags: int, kind: str = "none") -> None:
    if _libc().mount(source.encode() or None, target.encode(), kind.encode(), flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source} at {target}")


def _die_with_parent() -> None:
    _libc().prctl(1, signal.SIGKILL)


@functools.cache
def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() or not _ip():
        return "hosts in namespaces need Linux, root and iproute2"
    pid = os.fork()
    if not pid:
        with suppress(OSError):
            _unshare(NEW_MOUNTS | NEW_NAME | NEW_PIDS | NEW_NETWORK)
            made = subprocess.run(
                [_ip(), "link", "add", "a0", "type", "veth", "peer", "name", "b0"], capture_output=True
            )
            os._exit(made.returncode)
        os._exit(1)
    return "namespaces cannot be made here" if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) else ""


def _ip() -> str:
    return shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def tc() -> str:
    return shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")


def pids_written(hosts: Sequence[Host], count: int, seconds: float = 60.0) -> None:
    """Wait until ranks have noted their processes."""
    until = time.monotonic() + seconds
    while sum(bool(path.read_text()) for host in hosts for path in host.folder.glob("pid*")) < count:
        if time.monotonic() > until:
            said = [host.wait(0.01)[1] for host in hosts]
            raise AssertionError(f"the ranks did not start: {said}")
        time.sleep(0.05)


__all__ = ["ADDRESSES", "ETC_HOSTS", "NAMES", "PORT", "Host", "needs_hosts", "on_two_hosts", "pids_written", "tc"]
