"""What a rank of a pipeline takes while its model comes to be: built whole, or in ``onecard.deferred_init()``.

    python benchmarks/deferred_stages.py

Blocks of a linear layer and a norm, SGD without states, 4 ranks: a pipeline over all of them, and pipelines of 2 beside data
parallelism, ZeRO 1 and ZeRO 3. Peak resident memory of the largest rank above what the process had before: behind
``Engine.prepare``, and behind 4 steps, with the code of recordings in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import onecard as oc
from onecard.testing import run_ranks

MIB = 2**20
KINDS: dict[str, dict[str, Any]] = {
    "pp 4": {"pipeline": {"degree": 4}},
    "pp 2 x dp 2": {"pipeline": {"degree": 2}},
    "pp 2 x ZeRO 1": {"pipeline": {"degree": 2}, "sharding": {"enable": True, "stage": 1}},
    "pp 2 x ZeRO 3": {"pipeline": {"degree": 2}, "sharding": {"enable": True, "stage": 3}},
}


@dataclass(frozen=True)
class DeferredArgs:
    """Peak memory of ranks of a pipeline, of a model built whole and of a deferred one."""

    width: int = 1024
    blocks: int = 16


def blocks_of(args: DeferredArgs) -> nn.Module:
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(args.width, args.width), nn.LayerNorm(args.width), nn.Tanh())
            for _ in range(args.blocks)
        ]
    )


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def measured(kind: str, deferred: bool, args: DeferredArgs) -> tuple[int, int, float]:
    """Peaks behind ``prepare`` and behind 4 steps, and the last loss."""
    before = peak()
    torch.manual_seed(0)
    with oc.deferred_init() if deferred else oc.one_card_random():
        model = blocks_of(args)
    strategy = {name: dict(fields) for name, fields in KINDS[kind].items()}
    strategy["pipeline"] |= {"enable": True, "accumulate_steps": 4}
    engine = oc.Engine(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), strategy=strategy)
    spec = oc.InputSpec([8, args.width], "float32")
    engine.prepare(spec, spec, mode="train")
    prepared = peak() - before
    x = torch.linspace(-1, 1, 8 * args.width).reshape(8, args.width).sin()
    losses = [float(engine.run((x, x.cos()))["loss"]) for _ in range(4)]
    return prepared, peak() - before, losses[-1]


def main(args: DeferredArgs) -> None:
    whole = sum(p.nbytes for p in blocks_of(args).parameters())
    table = Table(
        "", "", "behind prepare (MiB)", "behind 4 steps (MiB)", "last loss", title=f"model: {whole / MIB:.0f} MiB"
    )
    for kind in KINDS:
        for deferred in (False, True):
            found = run_ranks(measured, 4, kind, deferred, args, timeout=300.0)
            prepared, stepped, _ = (max(values) for values in zip(*found, strict=True))
            built = "deferred" if deferred else "built whole"
            table.add_row(kind, built, f"{prepared / MIB:.0f}", f"{stepped / MIB:.0f}", f"{found[0][2]:.6f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(DeferredArgs))
