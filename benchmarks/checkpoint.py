"""Checkpoints of a GPT and its AdamW states, about 1 GiB, on 2 and 4 ranks: onecard and torch's distributed checkpoint (DCP).

    python benchmarks/checkpoint.py                 # some 10 minutes on 2 idle cores, and 3 GB of disk
    python benchmarks/checkpoint.py --gigabytes 0.2

The same shards (rows of each matrix, over all ranks) as DistTensors and as torch's DTensors, saved and loaded in turn by the same
processes; the median of the rounds. onecard's files have checksums, which its load compares; DCP's have those of zip files, which
nobody compares. Both are forced to the disk. As the limit: `dd conv=fsync` of as many bytes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import onecard as oc
from onecard.testing import run_ranks


@dataclass(frozen=True)
class CheckpointArgs:
    """Measure saving and loading."""

    gigabytes: float = 1.0737
    """of the state: parameters and two moments, float32"""
    rounds: int = 3
    """of each of save, load and asynchronous save; the median counts"""
    ranks: tuple[int, ...] = (2, 4)
    folder: Path = Path(tempfile.gettempdir())
    timeout: float = 1500.0


def shapes(gigabytes: float) -> dict[str, tuple[int, int]]:
    """The matrices and vectors of a GPT of width 1024 whose parameters and moments have so many bytes."""
    width, found, left = 1024, {"wte.weight": (8192, 1024), "wpe.weight": (1024, 1024)}, gigabytes * 1e9 / 12
    left -= sum(a * b for a, b in found.values())
    layer = 0
    while left > 0:
        block = {"attn.qkv.weight": (3 * width, width), "attn.out.weight": (width, width), "mlp.up.weight": (4 * width, width),
                 "mlp.down.weight": (width, 4 * width), "norm.weight": (width, 1), "mlp.up.bias": (4 * width, 1)}  # fmt: skip
        found |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
        left -= sum(a * b for a, b in block.values())
        layer += 1
    return found


def states(gigabytes: float, mesh: oc.ProcessMesh) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state as DistTensors, and the same memory as DTensors."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ours: dict[str, Any] = {"model": {}, "optimizer": {}}
    theirs: dict[str, Any] = {"model": {}, "optimizer": {}}
    device_mesh = init_device_mesh("cpu", (mesh.size,))
    for name, (a, b) in shapes(gigabytes).items():
        for place, key in (("model", name), ("optimizer", f"{name}.exp_avg"), ("optimizer", f"{name}.exp_avg_sq")):
            local = torch.rand(a // mesh.size, b)
            ours[place][key] = oc.from_local(local, mesh, [oc.Shard(0)])
            theirs[place][key] = DTensor.from_local(local, device_mesh, [oc.Shard(0)], run_check=False)
    return ours, theirs


class Memory:
    """The resident memory at its highest, in bytes above what it was in the beginning; looked at every 5 ms."""

    def __enter__(self) -> Memory:
        self.start = self.highest = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.highest = max(self.highest, self._now())

    def _now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def extra(self) -> int:
        return self.highest - self.start


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    start = time.perf_counter()
    value = act()
    dist.barrier()
    return time.perf_counter() - start, value


def flush() -> None:
    """Nobody writes for the one that was measured before."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def one_round(folder: Path, ours: Any, theirs: Any, number: int) -> dict[str, float]:
    """Seconds and bytes of everything once, onecard and DCP in turn."""
    found: dict[str, float] = {}
    mine, other = folder / f"onecard{number}", folder / f"dcp{number}"
    acts: list[tuple[str, Callable[[], Any]]] = [
        ("onecard save", lambda: oc.save_state_dict(ours, mine)),
        ("dcp save", lambda: dcp.save(theirs, checkpoint_id=other)),
        ("onecard load", lambda: oc.load_state_dict(ours, mine)),
        ("dcp load", lambda: dcp.load(theirs, checkpoint_id=other)),
    ]
    for name, act in acts if number % 2 else [acts[i] for i in (1, 0, 3, 2)]:
        flush()
        with Memory() as memory:
            found[name], _ = timed(act)
        found[f"{name} memory"] = memory.extra
    background: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        (
            "onecard",
            lambda: oc.save_state_dict(ours, folder / "onecard async", wait=False),
            lambda saving: saving.wait(),
        ),
        (
            "dcp",
            lambda: dcp.async_save(theirs, checkpoint_id=folder / f"dcp async{number}"),
            lambda future: _result(future),
        ),
    ]
    for name, begin, end in background if number % 2 else background[::-1]:
        flush()
        dist.barrier()
        start = time.perf_counter()
        running = begin()
        found[f"{name} pause"] = time.perf_counter() - start
        end(running)
        found[f"{name} async"] = time.perf_counter() - start
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            shutil.rmtree(path)
    dist.barrier()
    return found


def _result(future: Any) -> Any:
    return (future if hasattr(future, "result") else future.upload_completion).result()


def rank_main(args: CheckpointArgs, folder: Path) -> tuple[list[dict[str, float]], int]:
    warnings.simplefilter("ignore")
    mesh = oc.ProcessMesh(range(dist.get_world_size()), ["x"])
    ours, theirs = states(args.gigabytes, mesh)
    size = sum(x.numel() * 4 for part in ours.values() for x in part.values())
    return [one_round(folder, ours, theirs, number) for number in range(args.rounds + 1)][1:], size


def disk_limit(folder: Path, size: int) -> float:
    """GB/s of `dd` with fsync, two of them at once."""
    start = time.perf_counter()
    commands = [
        ["dd", "if=/dev/zero", f"of={folder / name}", "bs=1M", f"count={size >> 21}", "conv=fsync"]
        for name in ("a", "b")
    ]
    for process in [subprocess.Popen(c, stderr=subprocess.DEVNULL) for c in commands]:
        process.wait()
    seconds = time.perf_counter() - start
    for name in ("a", "b"):
        (folder / name).unlink()
    return size / seconds / 1e9


def main(args: CheckpointArgs) -> None:
    """Print a table for each number of ranks."""
    console = Console(width=130)
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            results = run_ranks(rank_main, ranks, args, Path(name), timeout=args.timeout, backend="gloo")
            size = results[0][1]
            limit = disk_limit(Path(name), size)
        # The slowest rank counts in each round.
        slowest = [{k: max(r[i][k] for r, _ in results) for k in results[0][0][i]} for i in range(args.rounds)]
        middle = {key: statistics.median(found[key] for found in slowest) for key in slowest[0]}
        table = Table(
            "",
            "onecard",
            "DCP",
            "onecard / DCP",
            title=f"{size / 2**30:.2f} GiB on {ranks} ranks; dd: {limit:.2f} GB/s",
        )
        for what in ("save", "load"):
            speeds = [size / middle[f"{who} {what}"] / 1e9 for who in ("onecard", "dcp")]
            each = [f["dcp " + what] / f["onecard " + what] for f in slowest]
            table.add_row(
                f"{what}, GB/s",
                *(f"{s:.2f}" for s in speeds),
                f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})",
            )
        for what in ("pause", "async"):
            pair = [middle[f"{who} {what}"] for who in ("onecard", "dcp")]
            words = (
                "asynchronous save: pause of training, s"
                if what == "pause"
                else "asynchronous save: until it is on the disk, s"
            )
            table.add_row(words, *(f"{t:.3f}" for t in pair), f"{pair[0] / pair[1]:.2f}")
        for what in ("save", "load"):
            pair = [middle[f"{who} {what} memory"] / 2**20 for who in ("onecard", "dcp")]
            table.add_row(f"peak extra memory of a rank at {what}, MiB", *(f"{m:.0f}" for m in pair), "")
        console.print(table)


if __name__ == "__main__":
    main(tyro.cli(CheckpointArgs))
