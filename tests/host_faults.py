"""What can go wrong between two hosts, each as a scene: what is done, and what both launchers say of it, after how long."""

import signal
import time
from collections.abc import Callable
from typing import Any

from several_hosts import PORT, Host, pids_written

# Each rank notes its process, and trains until it is stopped.
LONG = """
import os, time, torch, onecard as oc
oc.manual_seed(0)
mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
torch.manual_seed(0)
model = oc.shard_layer(torch.nn.Linear(8, 4), mesh)
optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), 0.01))
steps = int(os.environ.get("STEPS", "100000"))
for step in range(steps):
    x = oc.shard_tensor(torch.randn(8, 8), mesh, [oc.Shard(0)])
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if step == 2:
        open("pid" + os.environ["RANK"], "w").write(str(os.getpid()))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and step == 5:
        print("went on", flush=True)
        break
    time.sleep(0.02)
"""
End = tuple[int | None, str, float]


def options(host: Host, *more: str, port: int = PORT) -> list[str]:
    machine = ["--nnodes", "2", "--node_rank", str(host.number), "--master", f"10.77.0.1:{port}"]
    return [*machine, "--nproc_per_node", "2", "--wait", "40", "--lost", "4", *more]


def _started(hosts: list[Host], *more: str) -> None:
    for host in hosts:
        host.launch(options(host, *more), LONG)
    pids_written(hosts, 4)


def _ends(hosts: list[Host], within: float = 60.0) -> list[End]:
    begin = time.monotonic()
    return [(*host.wait(within)[:2], time.monotonic() - begin) for host in hosts]


def kill_launcher(hosts: list[Host], which: int = 1) -> list[End]:
    _started(hosts)
    hosts[which].ask("kill", None)
    return _ends(hosts)


def kill_first_launcher(hosts: list[Host]) -> list[End]:
    return kill_launcher(hosts, 0)


def kill_rank(hosts: list[Host]) -> list[End]:
    _started(hosts)
    hosts[1].ask("kill", 3)
    return _ends(hosts)


def interrupt(hosts: list[Host]) -> list[End]:
    _started(hosts)
    hosts[1].ask("kill", None, signal.SIGINT)
    return _ends(hosts)


def cut_cable(hosts: list[Host]) -> list[End]:
    _started(hosts)
    hosts[1].ask("cable", "down")
    return _ends(hosts)


def restart(hosts: list[Host]) -> list[End]:
    _started(hosts, "--max_restarts", "1")
    hosts[1].ask("kill", 3)
    return _ends(hosts)


def late_host(hosts: list[Host]) -> list[End]:
    for host in hosts:
        host.launch(options(host), LONG, {"STEPS": "5"})
        time.sleep(7 if host is hosts[0] else 0)
    return _ends(hosts)


def no_host(hosts: list[Host]) -> list[End]:
    hosts[0].launch(options(hosts[0], "--wait", "2"), LONG)
    return [*_ends(hosts[:1]), (0, "", 0.0)]


def wrong_port(hosts: list[Host]) -> list[End]:
    for host in hosts:
        host.launch(options(host, "--wait", "3", port=PORT + host.number), LONG)
    return _ends(hosts)


def other_version(hosts: list[Host]) -> list[End]:
    for host in hosts:
        host.launch(options(host), LONG, {"PRETENDED_VERSION": "0.0.1"} if host.number else {})
    return _ends(hosts)


def other_nnodes(hosts: list[Host]) -> list[End]:
    for host in hosts:
        host.launch(options(host, "--nnodes", str(2 + host.number)), LONG)
    return _ends(hosts)


_GONE = (
    "has given no sign for"  # said where ranks have lost connections, and where it is silent for as long as --lost says
)
FAULTS: dict[str, tuple[Callable[[list[Host]], list[End]], list[tuple[Any, str]], float]] = {
    # what is done: (the scene, for each host its exit status and a part of what it says, seconds within which both end)
    "the launcher of host 1 is killed": (kill_launcher, [(1, f"machine 1 (beta) {_GONE}"), (-9, "")], 20),
    "the launcher of host 0 is killed": (kill_first_launcher, [(-9, ""), (1, f"machine 0 (alpha) {_GONE}")], 20),
    "a rank of host 1 is killed": (
        kill_rank,
        [
            (1, "machine 1 (beta) says: rank 3 was killed by SIGKILL"),
            (137, "rank 3 on machine 1 (beta) was killed by SIGKILL"),
        ],
        20,
    ),
    "Ctrl-C on host 1": (
        interrupt,
        [(1, "machine 1 (beta) says: SIGINT ended it"), (130, "SIGINT: all ranks were")],
        25,
    ),
    "the cable is cut": (
        cut_cable,
        [(1, "machine 1 (beta) has given no sign for"), (1, "machine 0 (alpha) has given no sign for")],
        30,
    ),
    "a rank is killed, with --max_restarts 1": (restart, [(0, "went on"), (0, "")], 40),
    "host 1 starts 7 s late": (
        late_host,
        [(0, "waiting up to 40 s (--wait) for machine 1: start the same"), (0, "")],
        40,
    ),
    "host 1 never starts": (no_host, [(2, "machine 1 did not come within 2 s (--wait): start the same"), (0, "")], 20),
    "host 1 has another port": (
        wrong_port,
        [(2, "machine 1 did not come"), (2, "machine 0 has not answered at 10.77.0.1:29501 (Connection refused)")],
        20,
    ),
    "host 1 has another version of onecard": (
        other_version,
        [
            (2, "different versions of onecard: "),
            (2, "0.0.1 on machine 1 (beta). Install, or write, the same everywhere"),
        ],
        20,
    ),
    "host 1 has another --nnodes": (
        other_nnodes,
        [(2, "different --nnodes: 2 on machine 0 (alpha), 3 on machine 1 (beta)"), (2, "different --nnodes")],
        20,
    ),
}
