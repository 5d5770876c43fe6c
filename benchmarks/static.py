"""What a step costs as it is, recorded, and in plain torch: CPU time of a rank, two ranks on one host.

    python benchmarks/static.py

1. linear + relu + sum, 16x16, forward and backward, the batch cut over two ranks: the replay beside plain torch with autograd
   and beside the same local operators called by hand without it.
2. a GPT (d=64, 2 layers) with AdamW, dp=2: a step of plain torch on half the batch, of onecard as it is, of its replay.
3. a GPT (d=512, 4 layers, 256 tokens, batch 8) and seed 003's network in one process on all cores: plain torch, replayed,
   replayed with the fastest kernels; the microseconds of each product by each kernel; what recording costs.
4. that GPT on two ranks, dp=2 beside DDP and tp=2 beside layers by hand.
5. the peak memory of both networks, as they are and replayed.
6. how much of the messages of dp=2 is hidden behind backward, beside DDP: from a trace of shared memory.

    python benchmarks/static.py --small          # seconds: does all of it run?
    python benchmarks/static.py --only 3         # one part

All variants run in turn in one process on each rank. 1 and 2 are medians over rounds of rank 0's CPU time, 3 and 4 of wall time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

from hidden_messages import hidden  # noqa: E402
from static_large import SMALL, Sizes, one_process, peak, two_ranks  # noqa: E402

Step = Callable[[], Any]


@dataclass(frozen=True)
class StaticArgs:
    """Compare plain torch, onecard as it is, and a recording."""

    rounds: int = 15
    small_steps: int = 200
    """steps of the small layer in a round"""
    gpt_steps: int = 4
    """steps of the GPT in a round"""
    only: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """parts by number"""
    small: bool = False
    """tiny sizes, to see that all runs"""
    timeout: float = 900.0


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
        positive = F.linear(half, weight, bias).relu_()
        total = positive.sum()
        grad = torch.ops.aten.threshold_backward(torch.ones_like(total).expand(8, 16), positive, 0)
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
    """The first two parts."""
    torch.set_num_threads(1)
    return small(args) if 1 in args.only else {}, gpt(args) if 2 in args.only else {}


def show(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def beside(times: dict[str, float], base: str, unit: float, digits: int) -> list[tuple[str, ...]]:
    """Rows of times, each also as a multiple of one of them."""
    return [(name, f"{value * unit:,.{digits}f}", f"{value / times[base]:.2f}") for name, value in times.items()]


def cpu_times(args: StaticArgs) -> None:
    """Parts 1 and 2."""
    bases = ("the same operators by hand, without autograd", "plain torch")
    titles = ("1. linear + relu + sum, 16x16, 2 ranks", "2. GPT d=64 L=2, dp=2")
    for title, times, base in zip(
        titles, run_ranks(on_this_rank, 2, args, timeout=args.timeout)[0], bases, strict=True
    ):
        if times:
            show(title, ("", "us of CPU a step", f"/ {base}"), beside(times, base, 1, 0))


def alone(args: StaticArgs, sizes: Sizes) -> None:
    """Part 3."""
    found = run_ranks(one_process, 1, sizes, len(os.sched_getaffinity(0)), timeout=args.timeout)[0]
    for name, (times, recording, products) in found.items():
        show(f"3. {name}, one process", ("", "ms a step", "/ plain torch"), beside(times, "plain torch", 1e3, 1))
        print(f"recording takes {recording * 1e3:.0f} ms: {recording / times['plain torch']:.1f} steps of plain torch")
        rows = [(k, str(n), *(f"{t[x]:,.0f}" if x in t else "-" for x in ("torch", "onednn"))) for k, n, t in products]
        show(f"products of {name}", ("product", "in a step", "us by torch (MKL)", "us by oneDNN"), rows)


def together(args: StaticArgs, sizes: Sizes) -> None:
    """Part 4."""
    bases = {"dp": "DDP", "tp": "by hand, as Megatron-LM"}
    for axis, times in run_ranks(two_ranks, 2, sizes, timeout=args.timeout)[0].items():
        show(f"4. GPT, {axis}=2", ("", "ms a step", f"/ {bases[axis]}"), beside(times, bases[axis], 1e3, 1))


def beside_backward(args: StaticArgs, sizes: Sizes) -> None:
    """Part 6."""
    found = run_ranks(hidden, 2, sizes, timeout=args.timeout)[0]
    rows = [
        (name, f"{1e3 * moved:.1f}", f"{1e3 * still:.1f}", f"{100 * (1 - still / moved):.0f} %", f"{1e3 * step:.0f}")
        for name, (moved, still, step) in found.items()
    ]
    columns = ("", "ms that messages take", "ms that the program stands still", "hidden", "ms a step")
    show("6. messages of a GPT, dp=2", columns, rows)


def memory(args: StaticArgs, sizes: Sizes) -> None:
    """Part 5."""
    rows = []
    for name in ("GPT", "seed 003's network"):
        eager, replayed = (run_ranks(peak, 1, sizes, flag, name, timeout=args.timeout)[0] for flag in (False, True))
        rows.append((name, f"{eager:,.0f}", f"{replayed:,.0f}", f"{replayed / eager:.2f}"))
    show("5. peak memory above the start", ("", "MB, as it is", "MB, replayed", "replayed / as it is"), rows)


def main(args: StaticArgs) -> None:
    """Print the tables."""
    sizes = SMALL if args.small else Sizes()
    if args.small:
        args = replace(args, rounds=2, small_steps=20, gpt_steps=1)
    if {1, 2} & {*args.only}:
        cpu_times(args)
    for part, run in ((3, alone), (4, together), (5, memory), (6, beside_backward)):
        if part in args.only:
            run(args, sizes)


if __name__ == "__main__":
    main(tyro.cli(StaticArgs))
