"""What a step costs as it is, recorded, and in plain torch: CPU time of a rank, two ranks on one host.

    python benchmarks/static.py

1. linear + relu + sum, 16x16, forward and backward, the batch cut over two ranks: the replay beside plain torch with autograd
   and beside the same local operators called by hand without it.
2. a GPT (d=64, 2 layers) with AdamW, dp=2: a step of plain torch on half the batch, of onecard as it is, of its replay.

All variants run in turn in one process on each rank; a figure is the median over rounds of the CPU time of rank 0.
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
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
Step = Callable[[], Any]


@dataclass(frozen=True)
class StaticArgs:
    """Compare plain torch, onecard as it is, and a recording."""

    rounds: int = 15
    small_steps: int = 200
    """steps of the small layer in a round"""
    gpt_steps: int = 4
    """steps of the GPT in a round"""
    timeout: float = 600.0


def measured(steps: dict[str, Step], count: int, rounds: int) -> dict[str, float]:
    """Median microseconds of CPU time a step, the rounds of all variants interleaved."""
    for step in steps.values():
        for _ in range(3):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(count):
                step()
            found[name].append((time.process_time() - start) / count * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def small(args: StaticArgs) -> dict[str, float]:
    """The layer on this rank."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    torch.manual_seed(0)
    x, weight, bias = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)
    half = x[:8].clone()
    leaves = [t.clone().requires_grad_() for t in (weight, bias)]
    laid_out = oc.shard_tensor(x, mesh, [oc.Shard(0)])
    params = [oc.shard_tensor(t, mesh, [oc.Replicate()], requires_grad=True) for t in (weight, bias)]

    def with_autograd(x: Tensor, leaves: list[Tensor]) -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        total = F.linear(x, *leaves).relu().sum()
        total.backward()
        return total.detach()

    @torch.no_grad()
    def by_hand() -> Tensor:
        weight, bias = leaves
        hidden = F.linear(half, weight, bias).relu_()
        total = hidden.sum()
        grad = torch.ops.aten.threshold_backward(torch.ones_like(total).expand(8, 16), hidden, 0)
        weight.grad, bias.grad = grad.t() @ half, grad.sum(0)
        return total

    @oc.to_static
    def replayed(x: Tensor) -> Tensor:
        return with_autograd(x, params)

    steps: dict[str, Step] = {
        "plain torch": lambda: with_autograd(half, leaves),
        "the same operators by hand, without autograd": by_hand,
        "onecard": lambda: with_autograd(laid_out, params),
        "onecard, replayed": lambda: replayed(laid_out),
    }
    return measured(steps, args.small_steps, args.rounds)


def gpt(args: StaticArgs) -> dict[str, float]:
    """The GPT on this rank, with the time of recording."""
    from model import GPT, GPTConfig, next_byte_loss
    from placements import shard_batch, shard_model

    mesh = oc.ProcessMesh([0, 1], ["dp"])
    tokens = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def step_of(distributed: bool) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=256, max_seq_len=32, n_layer=2, n_head=4, d_model=64))
        model = shard_model(model, mesh) if distributed else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = oc.shard_optimizer(optimizer) if distributed else optimizer

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = next_byte_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, shard_batch(batch, mesh) if distributed else tuple(t[:4] for t in batch)

    plain, half = step_of(False)
    eager, cut = step_of(True)
    recorded, _ = step_of(True)
    static = oc.to_static(recorded)
    static(*cut)
    start = time.process_time()
    static(*cut)
    recording = (time.process_time() - start) * 1e6
    steps: dict[str, Step] = {
        "plain torch": lambda: plain(*half),
        "onecard": lambda: eager(*cut),
        "onecard, replayed": lambda: static(*cut),
    }
    return {**measured(steps, args.gpt_steps, args.rounds), "the step that is recorded": recording}


def on_this_rank(args: StaticArgs) -> tuple[dict[str, float], dict[str, float]]:
    """Both measurements."""
    torch.set_num_threads(1)
    return small(args), gpt(args)


def main(args: StaticArgs) -> None:
    """Print the CPU time of rank 0 for each variant."""
    found = run_ranks(on_this_rank, 2, args, timeout=args.timeout)[0]
    for title, times in zip(("linear + relu + sum, 16x16", "GPT d=64 L=2, dp=2"), found, strict=True):
        table = Table(title, "us of CPU a step", "/ plain torch")
        for name, value in times.items():
            table.add_row(name, f"{value:,.0f}", f"{value / times['plain torch']:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(StaticArgs))
