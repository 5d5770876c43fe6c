"""The elastic agent of torch with our rendezvous (no port open to the world), our log files and our way to end."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from onecard.comm.world import interface
from onecard.launch._guard import SessionGuard, end_sessions
from onecard.launch._logs import set_aside
from onecard.launch._machines import MachineLost, Machines
from onecard.launch._options import LaunchError, Options, Target, endpoint
from onecard.launch._say import say
from onecard.launch._screen import Screen
from onecard.launch._watch import BoardWatch

GRACE = 5  # seconds between the signal that asks ranks to end and the one that makes them
AFTER_FAILURE = 1  # the same where a rank has failed: the others can only wait for it
WORKER = Path(__file__).with_name("_worker.py")


class Rendezvous(RendezvousHandler):
    """A fixed set of machines meets at a TCPStore that machine 0 serves on one address only.

    torch's own TCPStore would listen on all interfaces, whatever host it is given; a listening socket that is handed
    to it is the way around. The ranks of each attempt get a store of their own, at a port of its own: Gloo and NCCL would
    find the addresses of the dead attempt's ranks in the old one.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.machines: Machines | None = None
        self._store: TCPStore | None = None  # where the machines meet, and the ranks of the first attempt
        self._later: TCPStore | None = None  # where the ranks of a later attempt meet
        self._attempts = 0
        self.host, self.port = endpoint(options.master) if options.master else ("127.0.0.1", 0)
        if options.nnodes > 1 and options.node_rank == 0:
            self.host = _own_address(self.host, self.port)

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._first_meeting()
            self.port = self._store.port
        port = self._port_of_attempt(self._store) if self._attempts else self.port
        self._attempts += 1
        return RendezvousInfo(
            PrefixStore(self.get_run_id(), self._store),
            self._options.node_rank,
            self._options.nnodes,
            RendezvousStoreInfo(self.host, port),
        )

    def _first_meeting(self) -> TCPStore:
        options = self._options
        if options.nnodes == 1:
            return self._serve(self.port)
        self.machines = Machines(options.node_rank, options.nnodes, self.host, self.port, options.wait, say)
        if options.node_rank:
            self.machines.reach()
        store = self._join() if options.node_rank else self._serve(self.port)
        self.machines.meet(PrefixStore("machines", store), options.nproc_per_node or 0)
        self.machines.watch()
        return store

    def _port_of_attempt(self, store: TCPStore) -> int:
        key = f"onecard/port{self._attempts}"
        if self._options.node_rank == 0:
            self._later = self._serve(0)
            store.set(key, str(self._later.port))
        until = time.monotonic() + self._options.wait
        while not _there(store, key):
            if self.machines is not None:
                self.machines.look(self._options.lost)
            if time.monotonic() > until:
                raise MachineLost(f"machine 0 does not start its ranks again within {self._options.wait:g} s (--wait)")
            time.sleep(0.05)
        return int(store.get(key))

    def _serve(self, port: int) -> TCPStore:
        listener = _listen(self.host, port)
        return TCPStore(
            self.host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    def _join(self) -> TCPStore:
        try:
            patience = timedelta(seconds=self._options.wait)
            return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=patience)
        except Exception as error:
            raise LaunchError(f"machine 0 does not answer at {self.host}:{self.port}: {error}") from error

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "onecard"

    def get_run_id(self) -> str:
        return "onecard"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _there(store: TCPStore, key: str) -> bool:
    try:
        return store.check([key])
    except (RuntimeError, DistError):  # machine 0 has gone, of which its signs of life tell
        return False


def _own_address(host: str, port: int) -> str:
    """Machine 0's address for the others, also where its name means loopback here (Debian's 127.0.1.1)."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise LaunchError(
            f"--master names {host!r}, which {socket.gethostname()} does not know ({error.strerror}): write this machine's "
            f"address for the others, --master ADDRESS:{port}. {interface.words()}"
        ) from error
    if interface.named_loopback(host) or not all(map(interface.named_loopback, found)):
        return host
    address = interface.own_address(host)
    if not address:
        raise LaunchError(
            f"{host} means loopback ({', '.join(found)}) on this machine, which the others cannot reach: write its address for "
            f"them, --master ADDRESS:{port}. {interface.words()}"
        )
    return address


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen at {host}:{port}: {error.strerror}. --master names an address of machine 0 and a free port"
        ) from error
    listener.listen(2048)
    return listener


@dataclass
class Workplace:
    """The files of one launch: logs for the user, notes of failures for us."""

    log_dir: Path
    notes: Path  # a private folder, gone after the launch
    environment: Mapping[str, str]
    guard: SessionGuard
    screen: Screen | None = None
    ranks: dict[int, int] = field(default_factory=dict)  # local rank -> rank
    size: str | None = None  # ranks of the attempt before
    attempt: int = 0  # how often all ranks were started again

    def __post_init__(self) -> None:
        self.watch = BoardWatch(self.notes)

    def log(self, rank: int) -> Path:
        return self.log_dir / f"rank{rank}.log"

    def note(self, rank: int) -> Path:
        return self.notes / f"rank{rank}.json"

    def prepare(self, local_rank: int, environment: dict[str, str]) -> None:
        """Sets the environment of one rank that is about to start, and its log file."""
        rank, attempt = int(environment["RANK"]), environment["TORCHELASTIC_RESTART_COUNT"]
        self.ranks[local_rank] = rank
        self.attempt = int(attempt)
        self.note(rank).unlink(missing_ok=True)
        self.watch.board(rank).unlink(missing_ok=True)
        if attempt == "0":
            set_aside([self.log(rank)])
        output = errors = str(self.log(rank).absolute())
        if rank == 0:
            self.screen = self.screen or Screen(self.log(0), self.notes)
            output, errors = self.screen.path, self.screen.errors
        if attempt != "0":
            limit = environment["TORCHELASTIC_MAX_RESTARTS"]
            with open(output, "a") as file:
                fewer = (
                    "" if self.size in (None, environment["WORLD_SIZE"]) else f" with {environment['WORLD_SIZE']} ranks"
                )
                file.write(f"--- restart {attempt} of {limit}{fewer} ---\n")
        self.size = environment["WORLD_SIZE"] if rank == 0 else self.size
        environment.update(self.environment)
        environment.update(
            ONECARD_OUTPUT=output, ONECARD_ERRORS=errors, ONECARD_ERROR_FILE=str(self.note(rank)),
            ONECARD_LAUNCHER_PID=str(os.getpid()),
        )  # fmt: skip
        environment["TORCHELASTIC_ERROR_FILE"] = ""
        environment["ONECARD_BOARD"] = str(self.watch.board(rank))

    def close(self) -> None:
        if self.screen is not None:
            self.screen.close()


class _Logs(LogsSpecs):
    """torch's hook before the ranks of an attempt start. The ranks open their log files themselves."""

    def __init__(self, workplace: Workplace) -> None:
        super().__init__(str(workplace.log_dir))
        self._workplace = workplace

    @property
    def root_log_dir(self) -> str:
        return str(self._workplace.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for local_rank, environment in envs.items():
            self._workplace.prepare(local_rank, environment)
        inherit = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherit, stderrs=dict(inherit), error_files=dict.fromkeys(envs, os.devnull))


class Agent(LocalElasticAgent):
    """torch's agent; it remembers which processes it started, so that all of theirs can be ended."""

    def __init__(self, spec: WorkerSpec, workplace: Workplace, options: Options) -> None:
        super().__init__(spec, logs_specs=_Logs(workplace))
        self.started: set[int] = set()
        self._workplace, self._grace, self._fewest, self._lost = workplace, options.grace, options.fewest, 0
        self._patience = options.lost

    @property
    def machines(self) -> Machines | None:
        """The other machines' launchers, where there are any and they have met."""
        handler = self._worker_group.spec.rdzv_handler
        return handler.machines if isinstance(handler, Rendezvous) else None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.kill()  # what the ranks of the attempt before have started may outlive them
        self._workplace.ranks.clear()
        pids = super()._start_workers(worker_group)
        self.started = set(pids.values())
        self._workplace.guard.watch(self.started)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._workplace.ranks
        if self._pcontext is not None:
            self._workplace.watch.look({ranks[local]: pid for local, pid in self._pcontext.pids().items()})
        if self.machines is not None:
            self.machines.look(self._patience)
        result = super()._monitor_workers(worker_group)
        # A rank that was killed is gone; one that failed in another way may have done so because of it.
        self._lost = max(1, sum(failure.exitcode == -signal.SIGKILL for failure in result.failures.values()))
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._fewest is not None:
            spec = worker_group.spec
            spec.local_world_size = max(self._fewest, spec.local_world_size - self._lost)
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        # Here and not by the argument of torch's method, which 2.11 does not have.
        if self._pcontext is not None:
            asked = isinstance(sys.exc_info()[1], SignalException)
            grace = AFTER_FAILURE if not asked else self._grace if death_sig == signal.SIGTERM else GRACE
            self._pcontext.close(death_sig, math.ceil(grace))
        super()._shutdown(death_sig)

    def kill(self) -> None:
        """Ends whatever is left of the ranks and of what they started, at once."""
        end_sessions(self.started)


def make_agent(options: Options, target: Target, nproc: int, workplace: Workplace) -> Agent:
    """Returns an agent that runs `target` on `nproc` ranks of this machine when its `run` is called."""
    kind = "module" if target.is_module else "script"
    arguments = (str(WORKER), kind, target.name, *target.arguments)
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=Rendezvous(replace(options, nproc_per_node=nproc)),
        entrypoint=sys.executable,
        args=tuple(argument.replace("$", "$$") for argument in arguments),  # torch takes them for templates
        max_restarts=options.max_restarts,
        monitor_interval=0.05,
    )
    return Agent(spec, workplace, options)


__all__ = ["Agent", "RunResult", "Workplace", "make_agent"]
