"""A training step of a GPT on 2 ranks (CPU), data and tensor parallel: through ``oc.Engine`` beside the eager program by marks.

    python benchmarks/engine_levels.py

The same model, the same marks, AdamW, float32. Losses must agree to 1e-5; then both are timed in turn in the same processes.
Ratios are medians over rounds; memory is the most bytes at once of what a step makes.
"""

from __future__ import annotations

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
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "tests"), str(Path(__file__).parent)]

from live_memory import Counted  # noqa: E402

import onecard as oc  # noqa: E402
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402
from placements import shard_model  # noqa: E402


@dataclass(frozen=True)
class Args:
    """Compare one training step of a GPT through an engine and by an eager loop."""

    rounds: int = 25
    """steps of each, in turn"""
    width: int = 256
    layers: int = 4
    tokens: int = 128
    rows: int = 8
    """of the whole batch"""


def _model(args: Args, level: str) -> tuple[GPT, torch.optim.Optimizer, oc.ProcessMesh]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(max_seq_len=args.tokens, n_layer=args.layers, n_head=4, d_model=args.width, dropout=0.0))
    mesh = oc.ProcessMesh([0, 1], [level])
    shard_model(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), mesh


def _batch(args: Args, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(256, (args.rows, args.tokens + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _eager(args: Args, level: str) -> Callable[[Tensor, Tensor], float]:
    model, optimizer, mesh = _model(args, level)
    optimizer = oc.shard_optimizer(optimizer)
    where = [oc.Shard(0) if level == "dp" else oc.Replicate()]

    def step(x: Tensor, y: Tensor) -> float:
        x, y = (oc.shard_tensor(t, mesh, where) for t in (x, y))
        loss = next_byte_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _engine(args: Args, level: str) -> Callable[[Tensor, Tensor], float]:
    model, optimizer, _ = _model(args, level)
    engine = oc.Engine(model, next_byte_loss, optimizer)
    shape = [args.rows, args.tokens]
    engine.prepare(oc.InputSpec(shape, "int64", "x"), oc.InputSpec(shape, "int64", "y"), mode="train")
    return lambda x, y: float(engine.run((x, y), mode="train")["loss"])


def measured(args: Args, level: str) -> tuple[float, list[float], list[int]]:
    """The largest relative difference of losses, seconds of each step as ratios engine / eager, bytes alive of both."""
    torch.set_num_threads(1)
    both: list[Any] = [_eager(args, level), _engine(args, level)]
    worst, ratios = 0.0, []
    for i in range(4):
        one, other = (step(*_batch(args, i)) for step in both)
        worst = max(worst, abs(one - other) / abs(one))
    for i in range(args.rounds):
        seconds = []
        for step in both:
            batch = _batch(args, 4 + i)
            dist.barrier()
            start = time.perf_counter()
            step(*batch)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
    alive = []
    for step in both:
        with Counted([]) as counted:
            step(*_batch(args, 99))
        alive.append(counted.peak)
    return worst, ratios, alive


def main(args: Args) -> int:
    """Prints a line for each level; 1 if losses differ."""
    failed = 0
    for level in ("dp", "tp"):
        worst, ratios, alive = run_ranks(measured, 2, args, level, timeout=500.0)[0]
        failed |= worst > 1e-5
        quarter = statistics.quantiles(ratios, n=4)
        print(
            f"{level}: engine / eager {statistics.median(ratios):.3f} (quartiles {quarter[0]:.3f} to {quarter[2]:.3f}), "
            f"losses to {worst:.0e}, live memory {alive[1] / alive[0]:.3f}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
