"""What it takes to record: CPU seconds and calls of Python functions of one rank, of this tree and of another one in turn.

    python benchmarks/recording.py                             # this tree
    python benchmarks/recording.py --other ../before/src       # beside the library of another checkout

A GPT (d=64, 4 layers, 32 tokens, batch 8) with clipping and AdamW. "marks": its second call on 2 ranks, tp=2. "1F1B", "ZBV":
its first two calls as a pipeline of 2 ranks with 4 microbatches, of which each is recorded and cut; "deep": of 16 layers under
1F1B. "plan": ``oc.plan`` of one with 2 layers for 4 ranks. "prove": ``oc.prove`` of one of 2 layers on 4 ranks. Seconds are the
least of rounds; each round is a process of its own. Calls are counted by Python's profiler: they are the same on a machine with
other work.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(Path(__file__).parent)]

KINDS = ("marks", "1F1B", "ZBV", "deep", "plan", "prove")
CUTS = {"1F1B": ("blocks.2",), "ZBV": ("blocks.1", "blocks.2", "blocks.3"), "deep": ("blocks.8",)}
DEEP = 16  # layers


@dataclass(frozen=True)
class RecordingArgs:
    """What recording takes."""

    kinds: tuple[str, ...] = KINDS
    """which"""
    rounds: int = 3
    """rounds; in each, every tree takes its turn"""
    other: Path | None = None
    """the folder with the library of another checkout"""
    one: str = ""
    """only this kind, here, as JSON: what each round runs"""
    calls: bool = False
    """count calls instead of seconds"""


def taken(function: Callable[[], Any], calls: bool) -> float:
    """CPU seconds of this process, or calls."""
    if not calls:
        began = time.process_time()
        function()
        return time.process_time() - began
    profile = cProfile.Profile()
    profile.runcall(function)
    return float(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def on_rank(kind: str, calls: bool) -> float:
    """The same of a rank's calls of a training step."""
    import torch

    import onecard as oc
    from model import GPT, GPTConfig, next_byte_loss
    from placements import shard_batch, shard_model

    torch.manual_seed(0)
    model = GPT(GPTConfig(max_seq_len=32, n_layer=DEEP if kind == "deep" else 4, n_head=4, d_model=64))
    ids = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(1))
    batch: Any = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    stages = oc.Stages(4, schedule="1F1B" if kind == "deep" else kind, at=CUTS[kind]) if kind in CUTS else None
    if stages is None:
        mesh = oc.ProcessMesh([[0, 1]], ["dp", "tp"])
        shard_model(model, mesh)
        batch = shard_batch(batch, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if stages is None:
        oc.shard_optimizer(optimizer)

    def step(x: Any, y: Any) -> Any:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    run = oc.to_static(step, stages=stages)
    if stages is None:
        run(*batch)  # makes the states
    spent = taken(lambda: run(*batch), calls)
    return spent if stages is None else spent + taken(lambda: run(*batch), calls)


def planned() -> None:
    import torch

    import onecard as oc
    from model import GPT, GPTConfig, next_byte_loss

    model, ids = GPT(GPTConfig(max_seq_len=32, n_layer=2, n_head=4, d_model=64)), torch.randint(256, (8, 32))
    oc.plan(model, world=4, batch=(ids, ids), loss=lambda model, x, y: next_byte_loss(model(x), y), machine="H100")


def proved() -> None:
    import onecard as oc
    from prove import Sizes, program

    oc.prove(program, Sizes(tp=2, dp=2), world=4)


def one(kind: str, calls: bool) -> float:
    import torch

    from onecard.testing import run_ranks

    torch.set_num_threads(1)
    if kind in ("plan", "prove"):
        return taken(planned if kind == "plan" else proved, calls)
    found: list[float] = run_ranks(on_rank, 2, kind, calls, timeout=600.0)
    return found[0]


def in_its_own(source: Path, kind: str, calls: bool) -> float:
    """One round in a process of its own, with the library in a folder."""
    command = [sys.executable, __file__, "--one", kind, *(["--calls"] if calls else [])]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(args: RecordingArgs) -> None:
    """Run all, print the table."""
    from rich.console import Console
    from rich.table import Table

    sources = [ROOT / "src", *([args.other] if args.other else [])]
    names = ["this tree", "the other", "this / the other"][: 1 if args.other is None else 3]
    table = Table("kind", "what", *names)
    for kind in args.kinds:
        for what, rounds in (("CPU seconds", args.rounds), ("calls", 0 if kind == "prove" else 1)):
            turns = [[in_its_own(source, kind, what == "calls") for source in sources] for _ in range(rounds)]
            if turns:
                least = [min(turn) for turn in zip(*turns, strict=True)]
                words = [f"{x:.2f}" if what == "CPU seconds" else f"{x:,.0f}" for x in least]
                table.add_row(kind, what, *words, *([f"{least[0] / least[1]:.2f}"] if args.other else []))
    Console(width=110).print(table)


if __name__ == "__main__":
    import tyro

    given = tyro.cli(RecordingArgs)
    if given.one:
        print(json.dumps(one(given.one, given.calls)))
    else:
        main(given)
