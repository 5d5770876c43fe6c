"""What a step will cost, said before it runs: GPT-3 175B for one rank of a thousand, without devices; and this machine's steps.

    python benchmarks/price.py gpt3                                  # tp=8, dp=128, then dp=12,500: what it takes to say it
    python benchmarks/price.py gpt3 --zero --draw gpt3.svg
    python benchmarks/price.py here                                  # predicted and measured seconds of steps on this CPU

``gpt3``: the whole step of the model (forward, backward, clipping, AdamW), recorded with tensors without data in a pretended
world, then priced by a data sheet. ``here``: ``Machine.measure()``, then programs priced by it and run; also with their own
operators measured in their place (``Machine.measure(recording)``).
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
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

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))


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

    rounds: int = 15


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
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
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
    """Predicted beside measured."""
    start = time.perf_counter()
    machine = oc.Machine.measure()
    Console().print(machine, f"measured in {time.perf_counter() - start:.1f} s")
    table = Table("step", "measured ms", "by curves", "ratio", "with its operators measured", "ratio")
    for name, make in PROGRAMS.items():
        step, batch = make()
        run = oc.to_static(step)
        for _ in range(3):
            run(*batch)
        took = statistics.median(_seconds(lambda run=run, batch=batch: run(*batch)) for _ in range(args.rounds))  # type: ignore[misc]
        recording = run.recordings[0]
        found = [recording.cost(m).seconds for m in (machine, oc.Machine.measure(recording))]
        table.add_row(name, f"{took * 1e3:.2f}", *(x for t in found for x in (f"{t * 1e3:.2f}", f"{t / took:.2f}")))
    Console().print(table)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _gpt(
    width: int, layers: int, sequence: int, batch: int, **options: Any
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    from model import GPT, GPTConfig, next_byte_loss

    torch.manual_seed(0)
    model = GPT(GPTConfig(256, sequence, layers, 4, width))
    ids = torch.randint(256, (batch, sequence + 1))
    step = _step(model, lambda out, y: next_byte_loss(out, y), torch.optim.AdamW(model.parameters(), **options))
    return step, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _mlp(inner: int, batch: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Seed 003's network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, inner), nn.Linear(inner, 256), nn.Linear(256, 10), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return _step(model, nn.CrossEntropyLoss(), optimizer), (torch.rand(batch, 256), torch.randint(10, (batch,)))


def _step(model: nn.Module, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "GPT d=64 L=2": lambda: _gpt(64, 2, 32, 8, fused=True),
    "GPT d=128 L=2, AdamW one by one": lambda: _gpt(128, 2, 64, 8),
    "GPT d=256 L=2": lambda: _gpt(256, 2, 128, 4, fused=True),
    "GPT d=512 L=4": lambda: _gpt(512, 4, 256, 8, fused=True),
    "seed 003, inner 10,240": lambda: _mlp(10_240, 32),
}

if __name__ == "__main__":
    chosen = tyro.cli(Gpt3 | Here)  # type: ignore[var-annotated, arg-type]
    gpt3(chosen) if isinstance(chosen, Gpt3) else here(chosen)
