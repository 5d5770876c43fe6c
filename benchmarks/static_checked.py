"""What it costs that recordings check themselves: CPU time of 1,000 calls, with and without.

    python benchmarks/static_checked.py            # a GPT of d=64 and one of d=512; minutes
    python benchmarks/static_checked.py --steps 100 --widths 64

For each width: the median CPU time of a replay and of a call that is compared, in turn in one process; what all comparisons of
so many calls (3, 4, 8, 16, ...) add to the replays. For the first width the calls are made as well, with and without, in turn.
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
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onecard as oc
from onecard.comm.agree import sparse_check
from onecard.static.run.rechecked import next_check

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))


@dataclass(frozen=True)
class Args:
    """What is measured."""

    widths: tuple[int, ...] = (64, 512)
    steps: int = 1000
    rounds: int = 15
    """pairs of a replay and a comparison"""


def recorded(width: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A training step of the GPT of examples/gpt, recorded, and a batch."""
    from model import GPT, GPTConfig, next_byte_loss

    torch.manual_seed(0)
    layers, length = (2, 64) if width < 128 else (4, 256)
    model = GPT(GPTConfig(vocab_size=256, max_seq_len=length, n_layer=layers, n_head=4, d_model=width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    tokens = torch.randint(0, 256, (8, length + 1))
    static, batch = oc.to_static(step), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for _ in range(2):
        static(*batch)
    return static, batch


def cpu(call: Callable[[], Any], count: int = 1) -> float:
    """Milliseconds of CPU time."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) * 1e3


def comparisons(steps: int) -> int:
    """How many of so many calls are compared."""
    count, call = 0, next_check(2)
    while call <= steps:
        count, call = count + 1, next_check(call)
    return count


def one(width: int, args: Args) -> tuple[float, float, float]:
    """Milliseconds of a replay, of a comparison, and the share of the comparisons in all calls."""
    static, batch = recorded(width)
    checks = static._bound[0].checks
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for compared in found:
            checks.due = 0 if compared else 1 << 62
            found[compared].append(cpu(lambda: static(*batch)))
    if checks.found:
        raise SystemExit(f"the comparison found: {checks.found}")
    replay, compared_call = (statistics.median(values) for values in found.values())
    return replay, compared_call, (compared_call - replay) * comparisons(args.steps) / (replay * args.steps)


def whole(width: int, args: Args) -> float:
    """What the calls take with comparisons, over what they take without: the median of three pairs, in turn."""
    ratios = []
    for _ in range(3):
        times = {}
        for wanted in (True, False):
            sparse_check.on.here = wanted
            static, batch = recorded(width)
            times[wanted] = cpu(lambda run=static, given=batch: run(*given), args.steps - 2)
        ratios.append(times[True] / times[False])
    sparse_check.on.here = True
    return statistics.median(ratios)


def main(args: Args) -> None:
    """Print both."""
    torch.set_num_threads(1)
    table = Table("GPT", "a replay, ms", "a call that is compared, ms", f"share of {args.steps} calls")
    for width in args.widths:
        replay, compared, share = one(width, args)
        table.add_row(f"d={width}", f"{replay:.2f}", f"{compared:.2f}", f"{share:.2%}")
    console = Console()
    console.print(table)
    ratio = whole(args.widths[0], args)
    console.print(f"d={args.widths[0]}: {args.steps} calls with comparisons / without: {ratio:.4f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
