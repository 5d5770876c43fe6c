"""What the check costs that is always on: a training step of a GPT on 2 ranks, data and tensor parallel, over shm and Gloo.

    python benchmarks/sparse_check.py            # some 6 minutes on 2 idle cores
    python benchmarks/sparse_check.py --small    # the small model alone, half a minute

Two figures for each: the time spent inside the check (every entry to it is timed, so small shares are seen exactly), as a
share of the step, in the 16 steps after the first 8, when calls are compared every 8 times; and whole steps with the check
over steps without (as ONECARD_CHECK=0), each in processes of their own, in turn, which also has what programs lose because
calls with plain operands are looked at.
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
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt")]

from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402
from placements import shard_batch, shard_model  # noqa: E402

N_RANKS = 2
FIRST, STEADY = 8, 16  # steps
MODELS = {
    "d64": (GPTConfig(max_seq_len=64, n_layer=2, n_head=4, d_model=64), 8),
    "d512": (GPTConfig(max_seq_len=256, n_layer=4, n_head=8, d_model=512), 8),
}


@dataclass(frozen=True)
class CheckArgs:
    """Measure the sparse check."""

    small: bool = False
    """only the model of width 64"""
    rounds: int = 3
    """starts of the ranks with the check and without, for each case"""
    timeout: float = 900.0
    """seconds for each start"""


class Inside:
    """The time spent in some functions, the outermost call counted."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def watch(self, holder: Any, name: str) -> None:
        function = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, outermost = time.perf_counter(), self.depth == 0
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if outermost:
                    self.seconds += time.perf_counter() - start

        setattr(holder, name, timed)


def watch_check() -> Inside:
    """Time every way into the check."""
    from onecard.comm.agree import clock
    from onecard.tensor import watched
    from onecard.tensor.dispatch import foreach, program

    inside = Inside()
    inside.watch(watched.Operands, "compare")
    inside.watch(clock.Clock, "tick")
    inside.watch(clock, "mark")
    for holder, name in ((watched, "whole"), (watched, "part"), (foreach, "written"), (program, "written")):
        inside.watch(holder, name)
    return inside


def train(size: str, axis: str, timed: bool, on: bool = True) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of the check within it, on this rank."""
    import onecard as oc
    from onecard.comm.agree import sparse_check

    sparse_check.on.here = on
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config, batch_size = MODELS[size]
    mesh = oc.ProcessMesh(range(N_RANKS), [axis])
    model = shard_model(GPT(config), mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    inside = watch_check() if timed else Inside()
    steps, shares = [], []
    for _ in range(FIRST + STEADY):
        ids = torch.randint(config.vocab_size, (batch_size, config.max_seq_len + 1))
        batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        dist.barrier()
        before, start = inside.seconds, time.perf_counter()
        x, y = shard_batch(batch, mesh) if axis == "dp" else batch
        loss = next_byte_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.barrier()
        steps.append(time.perf_counter() - start)
        shares.append(inside.seconds - before)
    return steps, shares


def measure(args: CheckArgs, size: str, axis: str, backend: str, say: Callable[[str], None]) -> list[str]:
    """One row of the table."""
    within: list[float] = []
    first: list[float] = []
    step: dict[bool, list[float]] = {True: [], False: []}
    say(f"{size} {axis}=2 {backend}")
    for steps, shares in run_ranks(train, N_RANKS, size, axis, True, backend=backend, timeout=args.timeout):
        within.append(sum(shares[FIRST:]) / sum(steps[FIRST:]))
        first.append(sum(shares[1:FIRST]) / sum(steps[1:FIRST]))
    for i in range(args.rounds):
        for on in (True, False) if i % 2 else (False, True):
            ranks = run_ranks(train, N_RANKS, size, axis, False, on, backend=backend, timeout=args.timeout)
            step[on].append(statistics.mean(ranks[0][0][FIRST:]))
    with_it, without = (statistics.median(step[on]) for on in (True, False))
    shown = (
        f"{max(within):.2%}",
        f"{max(first):.2%}",
        f"{with_it * 1e3:.1f}",
        f"{without * 1e3:.1f}",
        f"{with_it / without:.3f}",
    )
    return [size, f"{axis}=2", backend, *shown]


def main(args: CheckArgs) -> None:
    """Measure every case and print the table."""
    console = Console()
    table = Table("model", "mesh", "backend", "of a step", "of the first 8", "ms with", "ms without", "ratio")
    for size in MODELS if not args.small else ("d64",):
        for axis in ("dp", "tp"):
            for backend in ("shm", "gloo"):
                table.add_row(*measure(args, size, axis, backend, console.print))
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(CheckArgs))
