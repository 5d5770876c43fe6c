"""Bytes and time between two hosts of two ranks: a sum of gradients by onecard, and by DDP's way (Gloo over all ranks).

The hosts are network namespaces with a cable between them, which `tc` makes slow. Needs root and iproute2, on Linux:

    PYTHONPATH=tests python benchmarks/hosts.py [--rate 1gbit] [--mib 16] [--turns 5]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from several_hosts import PORT, Host, on_two_hosts, why_not

PROGRAM = """
import os, time, torch, torch.distributed as dist, onecard as oc
from onecard.comm.issue import collectives
from onecard.comm.issue.groups import group

def sent():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("eth7"))

world = group(oc.ProcessMesh(range(oc.get_world_size()), ["dp"]), 0)
flat = dist.new_group(backend="gloo")
x = torch.ones(int(os.environ["MIB"]) << 18)
ways = {
    "onecard": lambda: collectives.all_reduce(x, world, "sum", inplace=True),
    "DDP (Gloo)": lambda: dist.all_reduce(x, group=flat),
}
for turn in range(int(os.environ["TURNS"]) + 1):
    for name, way in ways.items():
        x.fill_(1.0)
        dist.barrier()
        before, begin = sent(), time.perf_counter()
        way()
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=flat)  # the slowest rank's
        dist.barrier()
        if turn and oc.get_rank() == 0:
            print(name, float(seconds), (sent() - before) / x.nbytes, sep="|", flush=True)
"""


def scene(hosts: list[Host], rate: str, mib: int, turns: int) -> Any:
    for host in hosts:
        host.ask("slow", rate)
        machine = [
            "--nnodes",
            "2",
            "--node_rank",
            str(host.number),
            "--master",
            f"10.77.0.1:{PORT}",
            "--nproc_per_node",
            "2",
        ]
        host.launch(machine, PROGRAM, {"MIB": str(mib), "TURNS": str(turns)})
    return [host.wait(240)[:2] for host in hosts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    with tempfile.TemporaryDirectory() as folder:
        (code, said), _ = on_two_hosts(scene, Path(folder), asked.rate, asked.mib, asked.turns, timeout=300)
    rows = [line.split("|") for line in said.splitlines() if line.count("|") == 2]
    if code or not rows:
        raise SystemExit(said)
    best = {}
    for name in dict.fromkeys(row[0] for row in rows):
        seconds = sorted(float(row[1]) for row in rows if row[0] == name)
        crossed = [float(row[2]) for row in rows if row[0] == name]
        best[name] = seconds[len(seconds) // 2]
        print(f"{name:12s} {1e3 * best[name]:8.1f} ms (median of {len(seconds)})  {max(crossed):.3f} P leave host 0")
    print(
        f"time of onecard / DDP: {best['onecard'] / best['DDP (Gloo)']:.2f}, {asked.mib} MiB at {asked.rate}, 2 hosts x 2 ranks"
    )


if __name__ == "__main__":
    main()
