"""What a step will cost, said before it runs: GPT-3 175B for one rank of a thousand, without devices; and this machine's steps.

    python benchmarks/price.py gpt3                                  # tp=8, dp=128, then dp=12,500: what it takes to say it
    python benchmarks/price.py gpt3 --zero --draw gpt3.svg
    python benchmarks/price.py job                                   # GPT-3 175B and LLaMA-3 405B as whole jobs
    python benchmarks/price.py here                                  # predicted and measured seconds of steps on this CPU

``gpt3``: the whole step of the model (forward, backward, clipping, AdamW), recorded with tensors without data in a pretended
world, then priced by a data sheet. ``job``: ``oc.price`` of whole jobs, what it takes with the recordings of their blocks and
without. ``here``: ``Machine.measure()``, then programs priced by it and run, on 1, 2 and 4 ranks; also
with their own operators measured in their place (``Machine.measure(recording)``).
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onecard as oc

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

from onecard.launch._allocator import allocator  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402
from price_here import PROGRAMS, rounds  # noqa: E402


@dataclass(frozen=True)
class Gpt3:
    """One rank of GPT-3 175B (Brown et al. 2020, table 2.1)."""

    layers: int = 96
    width: int = 12288
    heads: int = 96
    sequence: int = 2048
    words: int = 51200
    """50,257, made a multiple of what tensor parallelism divides"""
    tensor_parallel: int = 8
    data_parallel: tuple[int, ...] = (128, 12_500)
    rank: int = 17
    machine: str = "H100"
    zero: bool = False
    """the optimizer's states cut over dp (ZeRO stage 1)"""
    draw: Path | None = None


@dataclass(frozen=True)
class Here:
    """Steps on this machine."""

    rounds: int = 3
    """of measuring the machine and taking steps"""
    steps: int = 9
    """in a round"""
    threads: int = 1
    """of a rank"""
    only: tuple[str, ...] = ()
    """programs by name"""
    parts: bool = False
    """print where the time goes, by operator"""


@dataclass(frozen=True)
class Job:
    """Whole jobs: tensor, pipeline and data parallel, ZeRO stage 1."""


_GPT3 = oc.Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
_LLAMA = oc.Transformer(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, sequence=8192)
_OPTIONS: dict[str, Any] = {"tp": 8, "pp": 16, "zero": 1, "sequence_parallel": True}
_1F1B: dict[str, Any] = {**_OPTIONS, "microbatches": 16, "schedule": "1F1B"}
JOBS = {
    "GPT-3 175B, tp=8 pp=16 dp=8 VPP": (
        _GPT3, oc.Plan(dp=8, virtual=6, schedule="VPP", microbatches=64, **_OPTIONS), "A100",
    ),
    "LLaMA-3 405B on 16,384": (_LLAMA, oc.Plan(dp=128, **_1F1B), "H100"),
    "LLaMA-3 405B on 99,968": (_LLAMA, oc.Plan(dp=781, **_1F1B), "H100"),
}  # fmt: skip


def job(args: Job) -> None:
    """Price each twice: blocks that one job has recorded are there for the next."""
    table = Table("job", "s with recordings", "s after them", "GiB resident", "s a step", "MFU")
    for name, (model, plan, machine) in JOBS.items():
        took = []
        for _ in range(2):
            start = time.perf_counter()
            cost = oc.price(model, plan, oc.Machine.preset(machine))
            took.append(f"{time.perf_counter() - start:.2f}")
        table.add_row(name, *took, f"{_resident():.2f}", f"{cost.seconds:.2f}", f"{cost.mfu:.3f}")
    Console().print(table)


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpt3(args: Gpt3) -> None:
    """Record and price it for each size of the world."""
    table = Table(
        "ranks", "seconds: build", "record", "price", "all", "peak GiB of this process", "nodes", title="to say it"
    )
    for dp in args.data_parallel:
        start = time.perf_counter()
        recording, built = recorded(args, dp)
        done = time.perf_counter()
        price = recording.cost(oc.Machine.preset(args.machine))
        end = time.perf_counter()
        used = _resident()
        ranks = dp * args.tensor_parallel
        table.add_row(
            f"{ranks:,}",
            *(f"{t:.1f}" for t in (built - start, done - built, end - done, end - start)),
            f"{used:.2f}",
            f"{len(price.nodes):,}",
        )
        Console().print(f"rank {args.rank} of {ranks:,}, on a {args.machine}: {price}")
        Console().print(*(f"{name}: {n / 1e9:.2f} GB" for name, n in price.alive_at_peak[:6]), sep="; ")
    Console().print(table)
    if args.draw is not None:
        recording.draw(args.draw)


def recorded(args: Gpt3, dp: int) -> tuple[oc.Recording, float]:
    """The second step, when the optimizer has its states; and when the model was there."""
    from model import GPT, GPTConfig, next_byte_loss
    from placements import shard_batch, shard_model

    before = torch.get_default_dtype()
    with oc.pretend(dp * args.tensor_parallel, args.rank, fake=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            mesh = oc.ProcessMesh(np.arange(dp * args.tensor_parallel).reshape(dp, -1), ["dp", "tp"])
            config = GPTConfig(args.words, args.sequence, args.layers, args.heads, args.width)
            model = shard_model(GPT(config), mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=6e-5, fused=True)
            stage = oc.ShardingStage1("dp", mesh) if args.zero else None
            optimizer = oc.shard_optimizer(optimizer, stage) if stage else oc.shard_optimizer(optimizer)
            ids = torch.zeros(dp, args.sequence + 1, dtype=torch.long)  # one sequence for each rank along dp
            batch = shard_batch((ids[:, :-1], ids[:, 1:]), mesh)
            for p in model.parameters():  # so that the optimizer makes its states before the step that counts
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            built = time.perf_counter()

            def step(inputs: Tensor, targets: Tensor) -> Tensor:
                loss = next_byte_loss(model(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            step.__name__ = f"GPT-3 175B, rank {args.rank} of {dp * args.tensor_parallel:,}"
            return oc.record(step)(*batch), built
        finally:
            torch.set_default_dtype(before)


# -- on this machine -------------------------------------------------------------------------------------------------------


def here(args: Here) -> None:
    """Predicted beside measured, both the means of some rounds: a host that is shared has fast and slow moments."""
    os.environ |= allocator(os.environ)
    table = Table(
        "step", "ranks", "measured ms", "by curves", "ratio (of rounds)", "with its operators measured", "ratio"
    )
    for name, (ranks, _) in PROGRAMS.items():
        if args.only and name not in args.only:
            continue
        found = run_ranks(rounds, ranks, name, args.rounds, args.steps, args.threads, timeout=400)[0]
        took, curves, own = (statistics.fmean(getattr(f, k) for f in found) for k in ("took", "by_curves", "by_own"))
        each = sorted(f.by_curves / f.took for f in found)
        ratio = f"{curves / took:.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        cells = (f"{curves * 1e3:.1f}", ratio, f"{own * 1e3:.1f}", f"{own / took:.2f}")
        table.add_row(name, str(ranks), f"{took * 1e3:.1f}", *cells)
        print(name, f"{took * 1e3:.1f} ms", *cells, flush=True)
        if args.parts:
            Console().print(_parts(name, found[-1].parts))
    Console().print(table)


def _parts(name: str, parts: dict[str, tuple[float, float]]) -> Table:
    table = Table(f"{name}: operator", "ms by curves", "ms measured")
    for operator, times in sorted(parts.items(), key=lambda pair: -max(pair[1]))[:16]:
        table.add_row(operator, *(f"{t * 1e3:.3f}" for t in times))
    return table


if __name__ == "__main__":
    chosen = tyro.cli(Gpt3 | Job | Here)  # type: ignore[var-annotated, arg-type]
    {Gpt3: gpt3, Job: job, Here: here}[type(chosen)](chosen)
