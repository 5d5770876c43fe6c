"""What shapes that come up for the first time cost: memory and time of 5,000 of them, in plain torch and in onecard.

    python benchmarks/new_shapes.py

A small transformer block, forward and backward, on another (batch, length) each time, as rank 0 of a "fake" group of 8
ranks (data parallel 4, tensor parallel 2), whose messages send nothing. Each library runs in a process of its own in one
thread. Memory is what the process has in use (RSS), read after the first ``settle`` shapes and at the end.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onecard as oc

WIDTH, WORDS = 16, 32
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ShapeArgs:
    """Memory and time of many shapes, each used once, in plain torch and in onecard."""

    shapes: int = 5000
    settle: int = 1000
    """shapes after which memory is read for the first time"""
    only: str = ""
    """run one library in this process and print its figures as JSON"""


class Block(nn.Module):
    """Words in, loss out: embedding, attention and a feed-forward layer with their norms, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def cut(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
    """The feed-forward layer column- and row-parallel."""
    for last, placement, bias in (("up", oc.Shard(0), oc.Shard(0)), ("down", oc.Shard(1), oc.Replicate())):
        if name == last:
            module.weight = oc.shard_tensor(module.weight, mesh, [oc.Replicate(), placement])
            module.bias = oc.shard_tensor(module.bias, mesh, [oc.Replicate(), bias])


def torch_step() -> Callable[[int, int], None]:
    """A step of plain torch on one shape."""
    model = Block()

    def step(batch: int, length: int) -> None:
        model(torch.zeros(batch, length, dtype=torch.long)).backward()
        model.zero_grad()

    return step


def onecard_step() -> Callable[[int, int], None]:
    """The same on the ranks of a mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = oc.ProcessMesh([[0, 1], [2, 3], [4, 5], [6, 7]], ["dp", "tp"])
    model = oc.shard_layer(Block(), mesh, cut)

    def step(batch: int, length: int) -> None:
        ids = oc.shard_tensor(torch.zeros(batch, length, dtype=torch.long), mesh, [oc.Shard(0), oc.Replicate()])
        model(ids).backward()
        model.zero_grad()

    return step


STEPS = {"torch": torch_step, "onecard": onecard_step}


def resident() -> float:
    """MiB that this process has in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def measure(step: Callable[[int, int], None], args: ShapeArgs) -> dict[str, float]:
    """Memory before, after ``settle`` shapes and after all; seconds of CPU a shape. The largest shapes come first."""
    every = ((batch, length) for batch in range(87, 7, -1) for length in range(64, 1, -1))
    step(*next(every))
    before = resident()
    found = {"before": before, "settled": before}
    start = time.process_time()
    for number, (batch, length) in enumerate(islice(every, args.shapes), 1):
        step(batch, length)
        if number == args.settle:
            found["settled"] = resident()
    seconds = time.process_time() - start
    return {**found, "after": resident(), "milliseconds": seconds / args.shapes * 1e3}


def main(args: ShapeArgs) -> None:
    """Print how memory grows and what a shape takes, for each library."""
    torch.set_num_threads(1)
    if args.only:
        print(json.dumps(measure(STEPS[args.only](), args)))
        return
    table = Table(
        "library", "MiB", f"+ {args.settle:,} shapes", f"+ {args.shapes - args.settle:,} more", "CPU ms a shape",
        title=f"{args.shapes:,} shapes, each used once",
    )  # fmt: skip
    for name in STEPS:
        print(f"measuring {name}", flush=True)
        command = [sys.executable, __file__, "--only", name, "--shapes", str(args.shapes), "--settle", str(args.settle)]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        m = json.loads(line)
        growth = (m["settled"] - m["before"], m["after"] - m["settled"])
        table.add_row(name, f"{m['before']:.0f}", *(f"{g:+.1f}" for g in growth), f"{m['milliseconds']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(ShapeArgs))
