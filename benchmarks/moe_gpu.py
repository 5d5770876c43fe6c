"""A mixture of experts on a GPU, forward and backward in bfloat16: onecard by hand and by marks, beside torch's grouped products.

    python benchmarks/moe_gpu.py                                          # one rank, over NCCL
    onecard run --nproc_per_node 8 benchmarks/moe_gpu.py                  # a GPU for each rank
    python benchmarks/moe_gpu.py --device cpu --sizes 512,2048,2048,8     # does it run?

Variants, weights and tokens are those of ``moe.py``; they are timed in turn, and each says its loss. DeepSpeed is left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

sys.path[:0] = [str(Path(__file__).parent)]

import moe  # noqa: E402
from onecard.comm import device as own_device  # noqa: E402

VARIANTS = ("by hand", "fleet", "marks")


@dataclass(frozen=True)
class GpuArgs:
    """Time a mixture's forward and backward."""

    device: str = "cuda"
    """cuda or cpu"""
    sizes: tuple[str, ...] = ("512,2048,2048,8", "2048,5632,8192,8", "2048,1408,8192,64")
    """d, hidden, tokens of all ranks, experts"""
    rounds: int = 5


def placed(make: Callable[[Any], Any], device: torch.device) -> Callable[[Any], Any]:
    """What ``moe.py`` makes on the CPU, in bfloat16 on a device."""

    def made(args: Any) -> Any:
        with torch.device("cpu"):
            found = make(args)
        return (
            tuple(x.to(device, torch.bfloat16) for x in found)
            if isinstance(found, tuple)
            else found.to(device, torch.bfloat16)
        )

    return made


def timed(args: GpuArgs, sizes: moe.BenchArgs, device: torch.device) -> dict[str, tuple[float, float, float]]:
    """For each variant its loss, the median seconds of a step, and bytes above what was there at the peak (of a GPU)."""
    variants = {name: moe.build(sizes, name) for name in VARIANTS}
    variants["fleet"].run.to(device, torch.bfloat16)  # type: ignore[attr-defined]
    losses = {name: v.whole(loss) if v.whole else loss for name, v in variants.items() for loss in [v.step()]}
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, variant in variants.items():
            for _ in range(3):
                variant.step()
            sync()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(10):
                variant.step()
            sync()
            seconds[name].append((time.perf_counter() - begin) / 10)
    peaks = dict.fromkeys(VARIANTS, 0.0)
    for name, variant in variants.items() if device.type == "cuda" else ():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        variant.step()
        sync()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    return {name: (float(losses[name]), statistics.median(seconds[name]), peaks[name]) for name in VARIANTS}


def main(args: GpuArgs) -> None:
    """Time each of the sizes; rank 0 says them."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}.items():
        os.environ.setdefault(name, value)
    device = own_device() if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    moe.weights, moe.tokens = placed(moe.weights, device), placed(moe.tokens, device)
    for text in args.sizes:
        d, hidden, tokens, experts = map(int, text.split(","))
        sizes = moe.BenchArgs(ranks=dist.get_world_size(), tokens=tokens, d_model=d, hidden=hidden, experts=experts)
        found = timed(args, sizes, device)
        for name, (loss, taken, peak) in found.items() if dist.get_rank() == 0 else ():
            ratio = taken / found["by hand"][1]
            what = f"d {d}, hidden {hidden}, {tokens} tokens, {experts} experts, {sizes.ranks} ranks: {name}"
            print(
                f"{what}: {taken * 1e3:.2f} ms ({ratio:.2f}), {peak / 2**20:.0f} MiB at the peak, loss {loss:.6g}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(GpuArgs))
