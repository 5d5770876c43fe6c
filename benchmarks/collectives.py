"""Collectives between the processes of one host: the shared-memory backend and Gloo, side by side.

    python benchmarks/collectives.py [--ranks 2 4] [--largest 268435456] [--kinds all_reduce all_gather] [--seconds 0.1]

Both backends are groups of the same processes and take turns, size by size and round by round, so that whatever else
the machine does falls on both. Both are given the same numbers first, and must come to the same bits. Printed are
medians over the rounds of the slowest rank's mean time, the median of the rounds' ratios, and how near the
shared-memory one comes to the copies that its algorithm cannot avoid at the speed of this machine's memcpy, all ranks
copying at once. All of it takes some 8 minutes on 2 cores, and 3 GB.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import tyro

from onecard.comm.shm.algorithms import RELAY
from onecard.testing import run_ranks

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "send")


@dataclass(frozen=True)
class Options:
    """What to measure."""

    ranks: tuple[int, ...] = (2, 4)
    kinds: tuple[str, ...] = KINDS
    smallest: int = 1024
    """Bytes: of the whole tensor that a collective works on."""
    largest: int = 256 * 2**20
    rounds: int = 5
    seconds: float = 0.1
    """About as long is each backend measured in each round."""


@dataclass
class Case:
    """One collective of one size on this rank, and the bytes that this rank must at least copy."""

    kind: str
    size: int
    whole: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        ranks, count = dist.get_world_size(), max(self.size // 4, 4)
        self.whole = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(dist.get_rank())
        self.part = self.whole[: count // ranks].clone()
        self.parts = list(self.whole.chunk(ranks))
        self.other = torch.ones_like(self.whole)

    def checksum(self) -> int:
        """Of the bits of all tensors; of the reduced one on its root only, as the others may hold anything."""
        given = [self.part, self.other] + [self.whole] * (self.kind != "reduce" or dist.get_rank() == 0)
        return sum(int(t.view(torch.int32).sum(dtype=torch.int64)) for t in given)

    def run(self, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank()
        if self.kind == "all_reduce":
            dist.all_reduce(self.whole, group=group)
        elif self.kind == "reduce":
            dist.reduce(self.whole, 0, group=group)
        elif self.kind == "broadcast":
            dist.broadcast(self.whole, 0, group=group)
        elif self.kind == "all_gather":
            group._allgather_base(self.whole, self.part).wait()
        elif self.kind == "reduce_scatter":
            group._reduce_scatter_base(self.part, self.whole, dist.ReduceScatterOptions()).wait()
        elif self.kind == "all_to_all":
            dist.all_to_all_single(self.other, self.whole, group=group)
        elif self.kind == "gather":
            dist.gather(self.part, self.parts if rank == 0 else None, 0, group=group)
        elif self.kind == "scatter":
            dist.scatter(self.part, self.parts if rank == 0 else None, 0, group=group)
        elif rank == 0:
            dist.send(self.whole, 1, group=group)
            dist.recv(self.part[:1], 1, group=group)
        elif rank == 1:
            dist.recv(self.whole, 0, group=group)
            dist.send(self.part[:1], 0, group=group)

    def copied(self, ranks: int) -> float:
        """Bytes that all ranks together must copy: into shared memory, and out of it."""
        away = (ranks - 1) / ranks
        # All-reduce: in, all but the own part; out, the reduced part, and then everything. A large one: running totals,
        # read and written once by each rank, and everything out. What the reduction itself reads is free.
        reduced = 1 if self.size >= RELAY else away + 1 / ranks
        total = {
            "all_reduce": ranks * (reduced + 1),
            "reduce": ranks * reduced + 1,
            "broadcast": 1 + (ranks - 1),
            "all_gather": ranks * (1 / ranks + away),
            "reduce_scatter": ranks * (away + 1 / ranks),
            "all_to_all": ranks * 2 * away,
            "gather": 1 + away,
            "scatter": away + away,
            "send": 2,
        }
        return total[self.kind] * self.size


def copying(ranks: int) -> float:
    """Bytes a second that all ranks together copy in memory."""
    source, target = torch.ones(16 * 2**20 // 4), torch.ones(16 * 2**20 // 4)
    speeds = []
    for _ in range(7):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        spent = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        speeds.append(ranks * 8 * source.nbytes / float(spent))
    return statistics.median(speeds)


def agree(kind: str, size: int, groups: dict[str, dist.ProcessGroup]) -> None:
    """Runs a case once on each backend; raises unless all tensors have the same bits after it."""
    sums = []
    for group in groups.values():
        case = Case(kind, size)
        case.run(group)
        sums.append(case.checksum())
    if len(set(sums)) != 1:
        raise RuntimeError(f"{kind} of {size} bytes: {' and '.join(groups)} give different numbers")


def timed(case: Case, group: dist.ProcessGroup, times: int) -> float:
    """Seconds a call, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        case.run(group)
    spent = torch.tensor([(time.perf_counter() - begin) / times])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def measure(options: Options) -> list[tuple[str, int, float, float, float, float]]:
    """Runs on every rank: (kind, bytes, seconds of shm, of Gloo, median ratio, bytes/s all ranks copy)."""
    groups = {name: dist.new_group(backend=name) for name in ("shm", "gloo")}
    speed, found = copying(dist.get_world_size()), []
    if dist.get_rank() == 0:
        print(f"{'collective':15} {'bytes':>8} {'shm us':>12} {'gloo us':>12} {'ratio':>8} {'GB/s':>8} {'of copy':>8}")
    for kind in options.kinds:
        size = options.smallest
        while size <= options.largest:
            agree(kind, size, groups)
            case = Case(kind, size)
            times = {}
            for name, group in groups.items():
                case.run(group)
                times[name] = max(1, min(300, int(options.seconds / timed(case, group, 3))))
            rounds = [{name: timed(case, groups[name], times[name]) for name in groups} for _ in range(options.rounds)]
            ours, theirs = (statistics.median(r[name] for r in rounds) for name in ("shm", "gloo"))
            found.append((kind, size, ours, theirs, statistics.median(r["gloo"] / r["shm"] for r in rounds), speed))
            limit = case.copied(dist.get_world_size()) / speed
            if dist.get_rank() == 0:
                print(
                    f"{kind:15} {readable(size):>8} {1e6 * ours:12.1f} {1e6 * theirs:12.1f} {found[-1][4]:7.1f}x "
                    f"{size / ours / 1e9:8.2f} {100 * limit / ours:7.0f}%"
                )
            size *= 4
    return found


def readable(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def main(options: Options) -> None:
    for ranks in options.ranks:
        print(f"\n{ranks} ranks", flush=True)
        run_ranks(measure, ranks, options, timeout=1200)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
